// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace farspan {

// Consecutive queries whose visible interval stays or moves on with them: query first + i, 0 <= i < count, sees the
// positions [lo + i lo_step, hi + i hi_step). None of them sees anything when hi <= lo and both steps are alike.
struct VisibleRun {
  int64_t first = 0;
  int64_t count = 0;
  int64_t lo = 0;  // row positions, of query `first`
  int64_t hi = 0;
  int lo_step = 0;  // 0 or 1
  int hi_step = 0;

  bool operator==(const VisibleRun&) const = default;
};

}  // namespace farspan
