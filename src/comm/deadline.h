// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>

namespace farspan {

// The moment `seconds` from now. A wait of 30 years passes for one without end, and its clock arithmetic cannot
// overflow.
inline std::chrono::steady_clock::time_point deadline_after(double seconds) {
  constexpr double kLongestWaitSeconds = 1e9;
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                std::chrono::duration<double>(std::min(seconds, kLongestWaitSeconds)));
}

}  // namespace farspan
