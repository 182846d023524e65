// SPDX-License-Identifier: Apache-2.0
// The two 8-bit floats that matrix units multiply, bit by bit.
//
//            exponent  mantissa  bias  largest        smallest normal  infinity
//   f8e4m3   4 bits    3 bits    7     448            2^-6             none
//   f8e5m2   5 bits    2 bits    15    57344          2^-14            yes
//
// Source: Open Compute Project, 8-bit Floating Point Specification (OFP8), revision 1.0; Micikevicius et al., FP8
// Formats for Deep Learning (2022), table 1.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "base/error.h"
#include "tensor/dtype.h"

namespace farspan {

struct Fp8Format {
  int mantissa_bits;
  int smallest_exponent;  // of normal numbers
  int largest_exponent;
  float largest;
  bool has_infinity;  // and so no numbers at all with the highest exponent
};

inline constexpr Fp8Format kE4M3 = {3, -6, 8, 448.0f, false};
inline constexpr Fp8Format kE5M2 = {2, -14, 15, 57344.0f, true};

inline const Fp8Format& fp8_format(DType dtype) {
  FARSPAN_CHECK(is_fp8(dtype), "fp8_format: {}", name_of(dtype));
  return dtype == DType::f8e4m3 ? kE4M3 : kE5M2;
}

// Rounds to nearest, ties to even; what is too large, infinity too, becomes the largest number; NaN stays NaN.
inline uint8_t to_fp8(float x, const Fp8Format& format) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7f;
  const float magnitude = std::fmin(std::bit_cast<float>(bits & 0x7fffffffu), format.largest);
  const int exponent = static_cast<int>(std::bit_cast<uint32_t>(magnitude) >> 23) - 127;
  const int spacing =
      (exponent < format.smallest_exponent ? format.smallest_exponent : exponent) - format.mantissa_bits;
  // In units of the spacing, rounded by what an addition of 2^23 leaves of the fraction.
  const float units = magnitude * std::bit_cast<float>(static_cast<uint32_t>(127 - spacing) << 23);
  const auto rounded = static_cast<uint32_t>(units + 0x1p23f - 0x1p23f);
  // A normal number's first mantissa bit is not stored: it is one more in the exponent, as is the carry of a rounding.
  const auto field = static_cast<uint32_t>(spacing + format.mantissa_bits - format.smallest_exponent);
  return static_cast<uint8_t>(sign | ((field << format.mantissa_bits) + rounded));
}

inline float from_fp8(uint8_t bits, const Fp8Format& format) {
  const int mantissas = 1 << format.mantissa_bits;
  const int mantissa = bits % mantissas;
  const int field = (bits & 0x7f) / mantissas;
  const bool last = field == 0x7f / mantissas;
  const float sign = (bits & 0x80) != 0 ? -1.0f : 1.0f;
  if (last && format.has_infinity && mantissa == 0) return sign * HUGE_VALF;
  if (last && (format.has_infinity || mantissa == mantissas - 1)) return std::copysign(NAN, sign);
  const int significand = field == 0 ? mantissa : mantissa + mantissas;
  const int exponent = format.smallest_exponent + (field == 0 ? 0 : field - 1) - format.mantissa_bits;
  return sign * std::ldexp(static_cast<float>(significand), exponent);
}

}  // namespace farspan
