// SPDX-License-Identifier: Apache-2.0
// Matrices in 8-bit floats (tensor/fp8.h), for products whose operands are rounded to them and summed in fp32.
//
// One scale a matrix, a power of two: the largest by which its values still fit the format. What a value is
// rounded to then does not depend on the scale, as long as it is a normal number of the format (which all are down to
// about 2^-14 of the largest for f8e4m3, 2^-29 for f8e5m2): a matrix cut over ranks is rounded as the whole one is. And
// products of scales are exact. (Micikevicius et al., FP8 Formats for Deep Learning, 2022, section 4, scale to the
// largest value too.)
#pragma once

#include <cstdint>
#include <span>

#include "device/device.h"
#include "tensor/fp8.h"
#include "tensor/tensor.h"

namespace farspan {

// Matrix units read operands that are dense along the summed dimension, in pieces of 16 bytes: a forward product sums
// over a row of x, a backward one over its columns, so x is there twice, and whatever is summed over has a length of
// whole pieces.
inline constexpr int64_t kFp8Multiple = 16;

// x (R, C) as x[r][c] = values[r][c] * scale = transposed[c][r] * scale. What no product reads is left undefined.
struct Fp8Matrix {
  Tensor values;      // (R, C) f8e4m3 or f8e5m2, contiguous; C is a multiple of kFp8Multiple
  Tensor transposed;  // (C, R') of the same type, contiguous; R' = R rounded up to kFp8Multiple, zeros after R
  Tensor scale;       // (1) f32
};

// x (R, C) bf16, dense rows -> `to`, rounded to nearest, ties to even. Where x holds a value that is not finite the
// scale is NaN, and so is every product. The same bits on every device. amax (1) f32: the largest magnitude of x, where
// the op that wrote x left it (ops/amax.h); undefined, x is read twice.
void fp8_quantise(Device& device, const Tensor& x, const Tensor& amax, const Fp8Matrix& to);
inline void fp8_quantise(Device& device, const Tensor& x, const Fp8Matrix& to) { fp8_quantise(device, x, {}, to); }

// amax (n) f32: the largest magnitude (ops/amax.h) of each of n matrices x (R, C) bf16, dense rows, C a multiple of
// kFp8Multiple; at most kMostMeasured.
inline constexpr size_t kMostMeasured = 4;
void largest_magnitudes(Device& device, std::span<const Tensor> matrices, Tensor amax);

// The exponent e of the scale 2^-e: the largest value, whose magnitude has these bits as a float, times 2^e is at most
// the format's largest, 1.75 * 2^largest_exponent for both formats. 0 for a matrix of zeros.
constexpr int fp8_scale_exponent(uint32_t magnitude_bits, int largest_exponent) {
  constexpr int kMost = 126;  // 2^e and 2^-e are normal floats
  if (magnitude_bits == 0) return 0;
  const int exponent = static_cast<int>(magnitude_bits >> 23) - 127;
  const int room = largest_exponent - exponent - ((magnitude_bits & 0x7fffffu) > 0x600000u ? 1 : 0);
  return room > kMost ? kMost : room;
}

}  // namespace farspan
