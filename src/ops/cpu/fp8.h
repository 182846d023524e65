// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

#include "ops/fp8.h"

namespace farspan::cpu {

// amax undefined: found first.
void fp8_quantise(Device& device, const Tensor& x, const Tensor& amax, const Fp8Matrix& to);

void largest_magnitudes(Device& device, std::span<const Tensor> matrices, const Tensor& amax);

// The values that the 256 bit patterns stand for, times a scale.
std::array<float, 256> fp8_values(DType dtype, float scale);

}  // namespace farspan::cpu
