// SPDX-License-Identifier: Apache-2.0
// Element-by-element ops. Views of rank 1 to 4 with any outer strides and last stride 1.
// Throws InternalError on shapes or types that do not fit.
#pragma once

#include "device/device.h"
#include "tensor/tensor.h"

namespace farspan {

// y = a + b. f32 or bf16, each operand on its own; summed in fp32. y may be a or b.
void add(Device& device, const Tensor& a, const Tensor& b, Tensor y);

// y = x in y's dtype: f32 to bf16 (nearest, ties to even), bf16 to f32, or a copy of one dtype (any dtype).
// x and y must not overlap.
void cast(Device& device, const Tensor& x, Tensor y);

// x = value everywhere. f32, bf16, i32, i64; an integer tensor takes a value that is whole and fits.
void fill(Device& device, Tensor x, double value);

// x *= factor, f32.
void scale(Device& device, Tensor x, double factor);

}  // namespace farspan
