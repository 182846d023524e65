// SPDX-License-Identifier: Apache-2.0
// Read event by event, because a parsed JSON object no longer shows that a name came twice. The form has fixed depth,
// so the place in it is one of a few states.
#include "io/safetensors_header.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/log.h"

namespace farspan {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kMetadata = "__metadata__";

class HeaderEvents final : public nlohmann::json_sax<Json> {
 public:
  HeaderEvents(const std::string& path, SafetensorsHeader& header) : path_(path), header_(header) {}

  bool start_object(std::size_t) override {
    if (place_ == Place::file)
      place_ = Place::header;
    else if (place_ == Place::header)
      begin_entry();
    else
      wrong("an object");
    return true;
  }

  bool key(std::string& key) override {
    if (place_ == Place::header) {
      if (!names_.insert(key).second) refuse(fmt::format("duplicate name {}; each may come once", key));
      name_ = key;
    } else {
      if (!keys_.insert(key).second) refuse(fmt::format("{} gives '{}' twice; each key may come once", owner(), key));
      if (place_ == Place::tensor && key != "dtype" && key != "shape" && key != "data_offsets")
        refuse(fmt::format("{} has key '{}'; needs dtype, shape and data_offsets only", owner(), key));
      key_ = key;
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::tensor)
      for (const char* needed : {"dtype", "shape", "data_offsets"})
        if (!keys_.contains(needed))
          refuse(fmt::format("{} has no {}; needs dtype, shape and data_offsets", owner(), needed));
    place_ = place_ == Place::header ? Place::file : Place::header;
    return true;
  }

  bool string(std::string& value) override {
    if (place_ == Place::metadata)
      header_.metadata[key_] = value;
    else if (place_ == Place::tensor && key_ == "dtype")
      header_.tensors.back().dtype = value;
    else
      wrong("a string");
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::tensor || key_ == "dtype") wrong("an array");
    place_ = Place::sizes;
    return true;
  }
  bool end_array() override {
    place_ = Place::tensor;
    return true;
  }

  bool number_unsigned(uint64_t value) override {
    if (place_ != Place::sizes) wrong("a number");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      refuse(fmt::format("{}: {} holds {}; needs numbers below 2^63", owner(), key_, value));
    HeaderTensor& tensor = header_.tensors.back();
    (key_ == "shape" ? tensor.shape : tensor.data_offsets).push_back(static_cast<int64_t>(value));
    return true;
  }

  bool number_integer(int64_t value) override {
    if (place_ != Place::sizes) wrong("a number");
    refuse(fmt::format("{}: {} holds {}; needs numbers from 0", owner(), key_, value));
  }
  bool number_float(double, const std::string& text) override {
    if (place_ != Place::sizes) wrong("a number");
    refuse(fmt::format("{}: {} holds {}; needs whole numbers below 2^63", owner(), key_, text));
  }
  bool null() override { return wrong("null"); }
  bool boolean(bool) override { return wrong("true or false"); }
  bool binary(Json::binary_t&) override { return wrong("binary data"); }

  bool parse_error(std::size_t position, const std::string& token, const nlohmann::detail::exception&) override {
    refuse(fmt::format("not JSON at byte {} of the header, after '{}'", position, printable(token)));
  }

 private:
  enum class Place { file, header, tensor, metadata, sizes };

  void begin_entry() {
    keys_.clear();
    key_.clear();
    if (name_ == kMetadata) {
      place_ = Place::metadata;
      return;
    }
    place_ = Place::tensor;
    header_.tensors.push_back({.name = name_, .dtype = {}, .shape = {}, .data_offsets = {}});
  }

  std::string owner() const { return name_ == kMetadata ? name_ : fmt::format("tensor '{}'", name_); }

  [[noreturn]] void refuse(const std::string& what) const {
    throw DataError(one_line(fmt::format("'{}': {}", path_, what)));  // names may hold anything
  }

  [[noreturn]] bool wrong(std::string_view found) const {
    switch (place_) {
      case Place::file:
        refuse(fmt::format("the header is {}, needs an object", found));
      case Place::header:
        refuse(fmt::format("{} is {}, needs an object", owner(), found));
      case Place::metadata:
        refuse(fmt::format("{} '{}' is {}, needs a string", owner(), key_, found));
      case Place::sizes:
        refuse(fmt::format("{}: {} holds {}, needs whole numbers", owner(), key_, found));
      case Place::tensor:
        break;
    }
    refuse(fmt::format("{}: {} is {}, needs {}", owner(), key_, found,
                       key_ == "dtype" ? "a string" : "an array of numbers"));
  }

  // The end of a token as one short line.
  static std::string printable(const std::string& token) {
    std::string out = token.substr(token.size() > 20 ? token.size() - 20 : 0);
    std::replace_if(
        out.begin(), out.end(), [](char c) { return c < 0x20 || c > 0x7e; }, '?');
    return out;
  }

  const std::string& path_;
  SafetensorsHeader& header_;
  Place place_ = Place::file;
  std::set<std::string> names_;
  std::set<std::string> keys_;  // of the entry being read
  std::string name_;
  std::string key_;
};

}  // namespace

SafetensorsHeader parse_safetensors_header(const std::string& path, std::string_view text) {
  SafetensorsHeader header;
  HeaderEvents events(path, header);
  Json::sax_parse(text.begin(), text.end(), &events);
  return header;
}

}  // namespace farspan
