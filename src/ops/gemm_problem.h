// SPDX-License-Identifier: Apache-2.0
// A matrix product with the transposes already turned into strides: what the implementations of gemm are given.
#pragma once

#include <cstdint>
#include <string>

#include "tensor/dtype.h"

namespace farspan {

// One of the two strides is 1.
struct GemmOperand {
  const void* data = nullptr;
  int64_t row_stride = 0;     // elements
  int64_t column_stride = 0;  // elements
  DType dtype = DType::f32;
  const float* scale = nullptr;  // of fp8: what its values are times this, in the device's memory
};

// c (m, n) = a (m, k) b (k, n), plus the addend where there is one; rows of c and of the addend are dense.
struct GemmProblem {
  int64_t m = 0, n = 0, k = 0;
  GemmOperand a, b;  // of one type, or both of fp8
  void* c = nullptr;
  int64_t c_row_stride = 0;
  DType c_dtype = DType::f32;
  const void* addend = nullptr;  // (m, n) of c's type; c itself, or apart from it
  int64_t addend_row_stride = 0;
  bool fast_accumulation = false;  // of fp8: sums may stay in the matrix units' own accumulators (ops/gemm.h)
};

// Whether an implementation computed the product, and which of its variants did or why it declined.
struct GemmOutcome {
  bool ran = false;
  std::string detail;
};

}  // namespace farspan
