// SPDX-License-Identifier: Apache-2.0
// Every configuration key, once: where it stands in a file, its flag, its help, how its value is read and printed. The
// file reader, the command line, --help and the effective configuration all work from this table.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"
#include "config/value_text.h"

namespace farspan {

struct Key {
  std::string section;        // "model"
  std::string name;           // "num_layers"; nested keys with dots: "rope_scaling.factor"
  std::string values;         // what may follow, for help: "N", "X", "true|false", "text|fasta", ...
  std::string help;           // one line
  bool is_boolean = false;    // its flag alone means true
  bool is_list = false;       // its flag may be repeated, and commas separate items
  bool is_per_layer = false;  // a list of one is written as the value alone

  std::function<void(Config&, const ValueText&)> read;  // throws ValueError
  std::function<std::string(const Config&)> write;      // the value as YAML

  std::string path() const { return section + "." + name; }  // "model.rope_scaling.factor"
  std::string flag() const;                                  // "--rope-scaling-factor"
};

// In the order of the sections in config.h.
std::span<const Key> config_keys();

// The key of "section.name", or null.
const Key* find_key(std::string_view path);

// model, parallel, data, ... in order.
std::span<const std::string> config_sections();

// The spellings of a nested key's parents: "model.rope_scaling", "communication.cp_allgather", ...
bool is_key_group(std::string_view path);

}  // namespace farspan
