// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "ops/cpu/kernels.h"
#include "ops/operand_checks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/elementwise.cpp"
#include "hwy/foreach_target.h"
// After foreach_target, which sets the target it is compiled for.
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace farspan::cpu {
namespace HWY_NAMESPACE {

template <typename X, typename Y>
void cast_range(const X* x, Y* y, int64_t n) {
  for_vectors(n, [&](int64_t i, int64_t count) HWY_ATTR { store(load(x + i, count), y + i, count); });
}

template <typename A, typename B, typename Y>
void add_range(const A* a, const B* b, Y* y, int64_t n) {
  for_vectors(n, [&](int64_t i, int64_t count)
                     HWY_ATTR { store(hn::Add(load(a + i, count), load(b + i, count)), y + i, count); });
}

void cast_target(const void* x, DType x_dtype, void* y, DType y_dtype, int64_t n) {
  with_compute_type(x_dtype, [&](auto tx) {
    with_compute_type(
        y_dtype, [&](auto ty) { cast_range(static_cast<const decltype(tx)*>(x), static_cast<decltype(ty)*>(y), n); });
  });
}

void add_target(const void* a, DType a_dtype, const void* b, DType b_dtype, void* y, DType y_dtype, int64_t n) {
  with_compute_type(a_dtype, [&](auto ta) {
    with_compute_type(b_dtype, [&](auto tb) {
      with_compute_type(y_dtype, [&](auto ty) {
        add_range(static_cast<const decltype(ta)*>(a), static_cast<const decltype(tb)*>(b),
                  static_cast<decltype(ty)*>(y), n);
      });
    });
  });
}

double sum_of_squares_target(const float* x, int64_t n) {
  const hn::ScalableTag<double> d64;
  const hn::Rebind<float, decltype(d64)> d32;
  const int64_t step = static_cast<int64_t>(hn::Lanes(d64));
  auto even = hn::Zero(d64), odd = hn::Zero(d64);
  int64_t i = 0;
  for (; i + 2 * step <= n; i += 2 * step) {
    const auto first = hn::PromoteTo(d64, hn::LoadU(d32, x + i));
    const auto second = hn::PromoteTo(d64, hn::LoadU(d32, x + i + step));
    even = hn::MulAdd(first, first, even);
    odd = hn::MulAdd(second, second, odd);
  }
  double total = hn::GetLane(hn::SumOfLanes(d64, hn::Add(even, odd)));
  for (; i < n; ++i) total += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return total;
}

}  // namespace HWY_NAMESPACE
}  // namespace farspan::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace farspan::cpu {

HWY_EXPORT(cast_target);
HWY_EXPORT(add_target);
HWY_EXPORT(sum_of_squares_target);

void cast_elements(const void* x, DType x_dtype, void* y, DType y_dtype, int64_t n) {
  if (n == 0) return;
  if (x_dtype == y_dtype)
    std::memcpy(y, x, static_cast<size_t>(n * size_of(x_dtype)));
  else
    HWY_DYNAMIC_DISPATCH(cast_target)(x, x_dtype, y, y_dtype, n);
}

void add_elements(const void* a, DType a_dtype, const void* b, DType b_dtype, void* y, DType y_dtype, int64_t n) {
  HWY_DYNAMIC_DISPATCH(add_target)(a, a_dtype, b, b_dtype, y, y_dtype, n);
}

double sum_of_squares(const float* x, int64_t n) { return HWY_DYNAMIC_DISPATCH(sum_of_squares_target)(x, n); }

}  // namespace farspan::cpu
#endif
