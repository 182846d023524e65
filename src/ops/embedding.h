// SPDX-License-Identifier: Apache-2.0
// Token embedding. A token outside [0, V) throws DataError that names its index and id.
#pragma once

#include "device/device.h"
#include "tensor/tensor.h"

namespace farspan {

// y (T, H) = rows of weight (V, H) picked by tokens (T) i32. weight and y: one dtype, f32 or bf16; rows may be strided.
void embedding_forward(Device& device, const Tensor& tokens, const Tensor& weight, Tensor y);

// d_weight (V, H) f32 row tokens[t] += d_y (T, H) row t, for every t in ascending order: the same bits for any number
// of threads. d_y f32 or bf16.
void embedding_backward(Device& device, const Tensor& tokens, const Tensor& d_y, Tensor d_weight);

}  // namespace farspan
