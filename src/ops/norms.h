// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/device.h"
#include "tensor/tensor.h"

namespace farspan {

// Sum of squares of x, f32 contiguous, in fp64: the largest finite fp32 squared (1.2e77) is far from fp64's limit, so a
// finite gradient never overflows, and inf or NaN anywhere shows in the result. Fixed order for any number of threads.
// 0 on the dry device.
double sum_of_squares(Device& device, const Tensor& x);

}  // namespace farspan
