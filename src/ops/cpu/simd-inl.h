// SPDX-License-Identifier: Apache-2.0
// What the vector kernels share, compiled once per instruction set through Highway's foreach_target (so: a guard that
// toggles, and nothing here may be used outside HWY_NAMESPACE).
//
// Loads widen to fp32, stores narrow from it. The last, partial vector of a row goes through the same instructions as
// the full ones, padded with zeros, so an element's bits depend on its value alone and not on where a thread's range
// ends.
#if defined(FARSPAN_OPS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FARSPAN_OPS_CPU_SIMD_INL_H_
#undef FARSPAN_OPS_CPU_SIMD_INL_H_
#else
#define FARSPAN_OPS_CPU_SIMD_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "tensor/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace farspan::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using Floats = hn::Vec<F32>;

HWY_INLINE int64_t lanes() { return static_cast<int64_t>(hn::Lanes(F32())); }

HWY_INLINE Floats load(const float* from) { return hn::LoadU(F32(), from); }

HWY_INLINE Floats load(const BFloat16* from) {
  const hn::Rebind<uint32_t, F32> d32;
  const hn::Rebind<uint16_t, F32> d16;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from)));
  return hn::BitCast(F32(), hn::ShiftLeft<16>(bits));
}

HWY_INLINE void store(Floats value, float* to) { hn::StoreU(value, F32(), to); }

// Rounds to nearest, ties to even; NaN stays NaN: as to_bfloat16.
HWY_INLINE void store(Floats value, BFloat16* to) {
  const hn::Rebind<int32_t, F32> di32;
  const hn::Rebind<uint32_t, F32> d32;
  const hn::Rebind<uint16_t, F32> d16;
  const auto bits = hn::BitCast(d32, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(hn::Set(d32, 0x7fff), odd)));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(d32, 0x40));
  const auto number = hn::RebindMask(d32, hn::Eq(value, value));
  const auto upper = hn::IfThenElse(number, rounded, quiet);
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di32, upper)), d16, reinterpret_cast<uint16_t*>(to));
}

// `count` elements, the other lanes zero.
template <typename T>
HWY_INLINE Floats load(const T* from, int64_t count) {
  if (count == lanes()) return load(from);
  T padded[hn::MaxLanes(F32())] = {};
  std::memcpy(static_cast<void*>(padded), from, static_cast<size_t>(count) * sizeof(T));
  return load(padded);
}

template <typename T>
HWY_INLINE void store(Floats value, T* to, int64_t count) {
  if (count == lanes()) return store(value, to);
  T padded[hn::MaxLanes(F32())];
  store(value, padded);
  std::memcpy(static_cast<void*>(to), padded, static_cast<size_t>(count) * sizeof(T));
}

// Calls body(i, count) for i = 0, lanes, 2 lanes, ...; count is lanes() but for a last partial vector. Bodies are
// lambdas marked HWY_ATTR.
template <typename Body>
HWY_INLINE void for_vectors(int64_t n, const Body& body) {
  const int64_t step = lanes();
  int64_t i = 0;
  for (; i + step <= n; i += step) body(i, step);
  if (i < n) body(i, n - i);
}

HWY_INLINE float sum_lanes(Floats value) { return hn::GetLane(hn::SumOfLanes(F32(), value)); }

// e^x to 2 ulp. x = k ln2 + r with |r| <= ln2 / 2, e^r by its Taylor series to degree 7 (what is left out is below 6e-9
// of the value), 2^k put into the exponent. Below -87.3, where fp32 leaves its normal range, 0; above 88.3 the value
// there; NaN gives NaN.
HWY_INLINE Floats exponential(Floats x) {
  const F32 d;
  const hn::Rebind<int32_t, F32> di32;
  const auto lowest = hn::Set(d, -87.3f);
  const auto clamped = hn::Min(hn::Max(x, lowest), hn::Set(d, 88.3f));
  const auto k = hn::Round(hn::Mul(clamped, hn::Set(d, 1.442695041f)));
  // ln2 in two parts, the first with so few bits that k times it is exact.
  auto r = hn::NegMulAdd(k, hn::Set(d, 0.693359375f), clamped);
  r = hn::NegMulAdd(k, hn::Set(d, -2.12194440e-4f), r);
  auto series = hn::Set(d, 1.0f / 5040);
  series = hn::MulAdd(series, r, hn::Set(d, 1.0f / 720));
  series = hn::MulAdd(series, r, hn::Set(d, 1.0f / 120));
  series = hn::MulAdd(series, r, hn::Set(d, 1.0f / 24));
  series = hn::MulAdd(series, r, hn::Set(d, 1.0f / 6));
  series = hn::MulAdd(series, r, hn::Set(d, 0.5f));
  series = hn::MulAdd(series, r, hn::Set(d, 1.0f));
  series = hn::MulAdd(series, r, hn::Set(d, 1.0f));
  const auto power = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di32, k), hn::Set(di32, 127)));
  const auto value = hn::IfThenElseZero(hn::Ge(x, lowest), hn::Mul(series, hn::BitCast(d, power)));
  return hn::IfThenElse(hn::Eq(x, x), value, x);
}

}  // namespace HWY_NAMESPACE
}  // namespace farspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
