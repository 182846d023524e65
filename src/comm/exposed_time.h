// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

#include "comm/communicator.h"

namespace farspan {

// Adds its own lifetime to the communicator's exposed seconds.
class ExposedTime {
 public:
  explicit ExposedTime(Traffic& traffic) : traffic_(traffic) {}
  ~ExposedTime() {
    traffic_.exposed_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  ExposedTime(const ExposedTime&) = delete;
  ExposedTime& operator=(const ExposedTime&) = delete;

 private:
  Traffic& traffic_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace farspan
