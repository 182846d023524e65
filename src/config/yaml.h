// SPDX-License-Identifier: Apache-2.0
// A configuration file as a flat list of keys, each with the line it stands on. Knows YAML, not the keys.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/value_text.h"

namespace farspan {

struct YamlEntry {
  std::string path;  // the names of the maps it lies in and its own, with dots: "model.rope_scaling.factor"
  ValueText value;
  int64_t line = 0;  // of the key, from 1
};

// Every scalar and list of the document, in order. Empty maps and empty files give nothing. Throws ConfigError with
// FILE:LINE: cannot be read, not YAML, not one map, a key twice in one map (both lines), a key without a value, a list
// of something other than plain values.
std::vector<YamlEntry> read_yaml(const std::string& file);

}  // namespace farspan
