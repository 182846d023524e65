// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/fp8.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/math.h"
#include "device/parallel_for.h"
#include "ops/cpu/amax.h"
#include "ops/cpu/row_view.h"

namespace farspan::cpu {
namespace {

constexpr int64_t kBlock = 64;  // rows that are transposed at a time: one cache line of a transposed row

float power_of_two(int exponent) { return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23); }

float largest_magnitude(const Device& device, const Tensor& x) {
  float largest = 0;
  const RowView rows(x);
  parallel_for(device, x.dim(0), row_grain(x.dim(1)),
               [&](int64_t begin, int64_t end) { raise_amax(rows, x.dtype(), begin, end, largest); });
  return largest;
}

// Rows of one block. Those after the last are zeros of the transposed copy.
void quantise_block(const Tensor& x, const Fp8Format& format, float factor, const Fp8Matrix& to, int64_t begin) {
  const int64_t end = std::min(begin + kBlock, x.dim(0));
  const int64_t columns = x.dim(1);
  uint8_t* const transposed = to.transposed.defined() ? static_cast<uint8_t*>(to.transposed.raw()) : nullptr;
  const int64_t pitch = round_up(x.dim(0), kFp8Multiple);
  for (int64_t row = begin; row < end; ++row) {
    const BFloat16* from = x.data<BFloat16>() + row * x.stride(0);
    uint8_t* const values = to.values.defined() ? static_cast<uint8_t*>(to.values.raw()) + row * columns : nullptr;
    for (int64_t c = 0; c < columns; ++c) {
      const uint8_t rounded = to_fp8(to_float(from[c]) * factor, format);
      if (values != nullptr) values[c] = rounded;
      if (transposed != nullptr) transposed[c * pitch + row] = rounded;
    }
  }
  if (transposed == nullptr) return;
  for (int64_t row = end; row < std::min(begin + kBlock, pitch); ++row)
    for (int64_t c = 0; c < columns; ++c) transposed[c * pitch + row] = 0;
}

}  // namespace

void fp8_quantise(Device& device, const Tensor& x, const Tensor& amax, const Fp8Matrix& to) {
  const Fp8Format& format = fp8_format(to.values.defined() ? to.values.dtype() : to.transposed.dtype());
  const uint32_t largest = magnitude_bits(amax.defined() ? *amax.data<float>() : largest_magnitude(device, x));
  const bool finite = largest < 0x7f800000u;
  const int exponent = finite ? fp8_scale_exponent(largest, format.largest_exponent) : 0;
  *to.scale.data<float>() = finite ? power_of_two(-exponent) : NAN;
  parallel_for(device, ceil_div(x.dim(0), kBlock), row_grain(kBlock * x.dim(1)), [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      quantise_block(x, format, power_of_two(exponent), to, block * kBlock);
  });
}

void largest_magnitudes(Device& device, std::span<const Tensor> matrices, const Tensor& amax) {
  for (size_t i = 0; i < matrices.size(); ++i) amax.data<float>()[i] = largest_magnitude(device, matrices[i]);
}

std::array<float, 256> fp8_values(DType dtype, float scale) {
  std::array<float, 256> values;
  for (size_t bits = 0; bits < values.size(); ++bits)
    values[bits] = from_fp8(static_cast<uint8_t>(bits), fp8_format(dtype)) * scale;
  return values;
}

}  // namespace farspan::cpu
