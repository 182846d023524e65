// SPDX-License-Identifier: Apache-2.0
// What is wrong with a configuration, collected so that the user hears all of it at once.
#pragma once

#include <cstdint>
#include <fmt/format.h>
#include <string>
#include <utility>
#include <vector>

namespace farspan {

class Reasons {
 public:
  // One setting: its name, the value found, what would work.
  template <typename... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    reasons_.push_back(fmt::format(format, std::forward<Args>(args)...));
  }

  // Throws ConfigError "2 settings do not fit: (1) ...; (2) ..." when there is any.
  void throw_if_any() const;

 private:
  std::vector<std::string> reasons_;
};

// "6, 9 or 12"
std::string either(const std::vector<int64_t>& values);

}  // namespace farspan
