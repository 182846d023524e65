// SPDX-License-Identifier: Apache-2.0
#include "config/reasons.h"

#include "base/error.h"

namespace farspan {

void Reasons::throw_if_any() const {
  if (reasons_.empty()) return;
  if (reasons_.size() == 1) throw ConfigError(reasons_[0]);
  std::string message = fmt::format("{} settings do not fit: ", reasons_.size());
  for (size_t i = 0; i < reasons_.size(); ++i)
    message += fmt::format("{}({}) {}", i == 0 ? "" : "; ", i + 1, reasons_[i]);
  throw ConfigError(message);
}

std::string either(const std::vector<int64_t>& values) {
  std::string text;
  for (size_t i = 0; i < values.size(); ++i) {
    const char* separator = i == 0 ? "" : i + 1 == values.size() ? " or " : ", ";
    text += fmt::format("{}{}", separator, values[i]);
  }
  return text;
}

}  // namespace farspan
