// SPDX-License-Identifier: Apache-2.0
// One field of the configuration: from text, and back. Overloads by the field's type; used by the table of keys.
#pragma once

#include <cstdint>
#include <fmt/format.h>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/nearest_name.h"
#include "config/names.h"
#include "config/value_text.h"

namespace farspan {

inline void read_item(std::string_view text, int64_t& field) { field = read_integer(text); }
inline void read_item(std::string_view text, double& field) { field = read_real(text); }
inline void read_item(std::string_view text, bool& field) { field = read_boolean(text); }
inline void read_item(std::string_view text, std::string& field) { field = text; }

template <typename Choice>
requires std::is_enum_v<Choice>
void read_item(std::string_view text, Choice& field) {
  std::vector<std::string> known;
  for (const NamedChoice<Choice>& named : choices<Choice>()) {
    known.emplace_back(named.name);
    if (named.name == text) {
      field = named.choice;
      return;
    }
  }
  throw ValueError(
      fmt::format("expected one of {}, found \"{}\"{}", fmt::join(known, ", "), text, did_you_mean(text, known)));
}

inline std::string write_item(int64_t value) { return fmt::format("{}", value); }
inline std::string write_item(double value) {
  return fmt::format("{}", value);
}  // the shortest text that reads back the same
inline std::string write_item(bool value) { return value ? "true" : "false"; }
inline std::string write_item(const std::string& value) { return value; }

template <typename Choice>
requires std::is_enum_v<Choice> std::string write_item(Choice value) { return std::string(choice_name(value)); }

template <typename Field>
void read_field(const ValueText& value, Field& field) {
  if (value.is_list) throw ValueError(fmt::format("expected one value, found a list of {}", value.items.size()));
  read_item(value.items.at(0), field);
}

template <typename Item>
void read_field(const ValueText& value, std::vector<Item>& field) {
  std::vector<Item> items;
  for (const std::string& text : value.items) read_item(text, items.emplace_back());
  field = std::move(items);
}

template <typename Field>
std::string write_field(const Field& field) {
  return yaml_scalar(write_item(field));
}
inline std::string write_field(int64_t field) { return write_item(field); }
inline std::string write_field(double field) { return write_item(field); }

template <typename Item>
std::string write_field(const std::vector<Item>& field) {
  std::vector<std::string> items;
  for (const Item& item : field) items.push_back(write_item(item));
  return yaml_list(items);
}

// A setting with one value for all layers or one for each: a list, or one value, in which commas separate too. One
// value is written as such.
template <typename Item>
void read_per_layer(const ValueText& value, std::vector<Item>& field) {
  std::vector<Item> items;
  for (const std::string& text : value.items) {
    if (text.empty()) read_item(text, items.emplace_back());  // throws what was expected
    for (const std::string& part : split_commas(text)) read_item(part, items.emplace_back());
  }
  if (items.empty()) throw ValueError("expected one value, or one for each layer, found an empty list");
  field = std::move(items);
}

template <typename Item>
std::string write_per_layer(const std::vector<Item>& field) {
  return field.size() == 1 ? write_field(field[0]) : write_field(field);
}

template <typename Field>
std::string values_of() {
  if constexpr (std::is_same_v<Field, int64_t>) return "N";
  if constexpr (std::is_same_v<Field, double>) return "X";
  if constexpr (std::is_same_v<Field, bool>) return "true|false";
  if constexpr (std::is_same_v<Field, std::string>) return "TEXT";
  if constexpr (std::is_same_v<Field, std::vector<std::string>>) return "TEXT,...";
  if constexpr (std::is_same_v<Field, std::vector<int64_t>>) return "N,...";
  std::string names;
  if constexpr (std::is_enum_v<Field>) {
    for (const NamedChoice<Field>& named : choices<Field>())
      names += (names.empty() ? "" : "|") + std::string(named.name);
  }
  return names;
}

}  // namespace farspan
