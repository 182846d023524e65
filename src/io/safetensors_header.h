// SPDX-License-Identifier: Apache-2.0
// The JSON header of a safetensors file, as it stands there: no layout is checked yet.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace farspan {

struct HeaderTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<int64_t> data_offsets;
};

struct SafetensorsHeader {
  std::vector<HeaderTensor> tensors;
  std::map<std::string, std::string> metadata;
};

// Throws DataError, its message beginning with `path`, for text that is no JSON object of the format's form: a name
// that comes twice, a missing or unknown key, a value of the wrong type, a negative or fractional size.
SafetensorsHeader parse_safetensors_header(const std::string& path, std::string_view text);

}  // namespace farspan
