// SPDX-License-Identifier: Apache-2.0
// The largest magnitude of a matrix as a by-product of the op that writes it: fp8_quantise needs it before it rounds
// the first value, and would read the whole matrix once more to find it.
//
// An op's amax (1) f32 is written with the largest magnitude of the values it stored, as they were rounded; NaN counts
// as larger than infinity, and no rows give 0. It is exact whatever the order, so it is what a pass over the matrix
// finds, on every device. Undefined: not wanted.
#pragma once

#include <string_view>

#include "ops/operand_checks.h"
#include "tensor/tensor.h"

namespace farspan {

// A matrix that a product reads, and its largest magnitude where that is known.
struct Measured {
  Tensor matrix;
  Tensor amax = {};  // (1) f32; undefined: not known
};

inline void check_amax(std::string_view op, std::string_view operand, const Tensor& amax) {
  if (!amax.defined()) return;
  check_dtype(op, operand, amax, DType::f32);
  check_shape(op, operand, amax, Shape{1});
}

inline int64_t amax_bytes(const Tensor& amax) { return amax.defined() ? amax.bytes() : 0; }

}  // namespace farspan
