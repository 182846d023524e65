// SPDX-License-Identifier: Apache-2.0
// The bias of a linear layer. Throws InternalError on shapes or types that do not fit.
#pragma once

#include "device/device.h"
#include "tensor/tensor.h"

namespace farspan {

// y (T, O) += bias (O) on every row, in place. Both f32 or bf16, each on its own.
void bias_add(Device& device, const Tensor& bias, Tensor y);

// d_bias (O) f32 += the column sums of d_y (T, O). Sums run over rows in order: the same bits for any number of
// threads.
void bias_backward(Device& device, const Tensor& d_y, Tensor d_bias);

}  // namespace farspan
