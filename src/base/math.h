// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "base/error.h"

namespace farspan {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t multiple) { return ceil_div(a, multiple) * multiple; }
constexpr int64_t round_down(int64_t a, int64_t multiple) { return a / multiple * multiple; }

// a * b for sizes and byte counts; throws InternalError when the product passes 2^63.
inline int64_t checked_mul(int64_t a, int64_t b) {
  int64_t product = 0;
  FARSPAN_CHECK(!__builtin_mul_overflow(a, b, &product), "size {} * {} does not fit in 64 bits", a, b);
  return product;
}

}  // namespace farspan
