// SPDX-License-Identifier: Apache-2.0
// RMSNorm: y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + epsilon) over the last dimension.
// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4.
//
// Rows are (T) or (T, A): x, y and their gradients are (T, H) or (T, A, D) views with any outer strides and last stride
// 1, so that the norm of q and k works inside the fused QKV. All sums are fp32 or wider; inputs and outputs f32 or
// bf16. Throws InternalError on shapes or types that do not fit.
#pragma once

#include "device/device.h"
#include "ops/accumulate.h"
#include "tensor/tensor.h"

namespace farspan {

// x, y (T, H) or (T, A, D), one dtype; weight (H) or (D), f32 or bf16; rstd (T) or (T, A) f32, contiguous. y may be x.
// amax: of y (ops/amax.h).
void rms_norm_forward(Device& device, const Tensor& x, const Tensor& weight, double epsilon, Tensor y, Tensor rstd,
                      Tensor amax = {});

// With xhat = x * rstd and g = d_y * weight, per row of length H:
//   d_x = rstd * (g - xhat * mean(g * xhat))          (added to d_x when accumulating)
//   d_weight += sum over rows of d_y * xhat
// d_weight (H) or (D) f32. d_x may be d_y when not accumulating. The weight gradient is summed over fixed blocks of
// rows in order, so its bits do not depend on the number of threads; several calls over token tiles just accumulate.
void rms_norm_backward(Device& device, const Tensor& d_y, const Tensor& x, const Tensor& weight, const Tensor& rstd,
                       Tensor d_x, Accumulate accumulate_d_x, Tensor d_weight);

}  // namespace farspan
