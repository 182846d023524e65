// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "device/device.h"
#include "tensor/tensor.h"

namespace farspan {

// sum (1) f64 += squares of x, f32 contiguous, in fp64: the largest finite fp32 squared (1.2e77) is far from fp64's
// limit, so a finite gradient never overflows, and inf or NaN anywhere shows in the result. Fixed order for any number
// of threads.
void sum_of_squares(Device& device, const Tensor& x, Tensor sum);

// The same of many tensors in one call. On a CPU the bits of one call after the other.
void sum_of_squares(Device& device, std::span<const Tensor> tensors, Tensor sum);

}  // namespace farspan
