// SPDX-License-Identifier: Apache-2.0
// RMSNorm of query and key heads and the rotation of its result, as rms_norm.h and rope.h define them, in one pass over
// the heads where the device has one; otherwise one op after the other.
#pragma once

#include "device/device.h"
#include "ops/rope.h"
#include "tensor/tensor.h"

namespace farspan {

// y = rope_apply(rms_norm(x)) forward. x, y (T, A, D) of one dtype, f32 or bf16, any outer strides; weight (D), f32 or
// bf16; table (T, 2, D/2) f32; rstd (T, A) f32, contiguous. y may be x. Throws InternalError on misfits.
void rms_norm_rope_forward(Device& device, const Tensor& x, const Tensor& weight, double epsilon, const Tensor& table,
                           RopeStyle style, Tensor y, Tensor rstd);

// d_y turned back, and then the gradients of the norm: d_x (T, A, D) is written, d_weight (D) f32 added to. d_x may be
// d_y.
void rms_norm_rope_backward(Device& device, const Tensor& d_y, const Tensor& x, const Tensor& weight,
                            const Tensor& rstd, const Tensor& table, RopeStyle style, Tensor d_x, Tensor d_weight);

}  // namespace farspan
