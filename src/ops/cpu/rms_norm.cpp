// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "ops/cpu/kernels.h"
#include "ops/operand_checks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/rms_norm.cpp"
#include "hwy/foreach_target.h"
// After foreach_target, which sets the target it is compiled for.
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace farspan::cpu {
namespace HWY_NAMESPACE {

// Two accumulators: one would wait for its own previous addition.
template <typename T>
float sum_of_row_squares(const T* x, int64_t columns) {
  auto even = hn::Zero(F32()), odd = hn::Zero(F32());
  int64_t i = 0;
  for (const int64_t step = lanes(); i + 2 * step <= columns; i += 2 * step) {
    const auto first = load(x + i), second = load(x + i + step);
    even = hn::MulAdd(first, first, even);
    odd = hn::MulAdd(second, second, odd);
  }
  for_vectors(columns - i, [&](int64_t j, int64_t count) HWY_ATTR {
    const auto last = load(x + i + j, count);
    even = hn::MulAdd(last, last, even);
  });
  return sum_lanes(hn::Add(even, odd));
}

template <typename T, typename W>
void forward_rows(const RmsNormForward& norm, int64_t begin, int64_t end) {
  const int64_t columns = norm.x.columns();
  const W* weight = static_cast<const W*>(norm.weight);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = norm.x.row<T>(row);
    T* y = norm.y.row<T>(row);
    const double mean = static_cast<double>(sum_of_row_squares(x, columns)) / static_cast<double>(columns);
    const float rstd = static_cast<float>(1.0 / std::sqrt(mean + norm.epsilon));
    norm.rstd[row] = rstd;
    const auto factor = hn::Set(F32(), rstd);
    for_vectors(columns, [&](int64_t i, int64_t count) HWY_ATTR {
      store(hn::Mul(hn::Mul(load(x + i, count), factor), load(weight + i, count)), y + i, count);
    });
  }
}

template <typename T, typename W>
void backward_rows(const RmsNormBackward& norm, int64_t begin, int64_t end, float* d_weight) {
  const int64_t columns = norm.x.columns();
  const W* weight = static_cast<const W*>(norm.weight);
  for (int64_t row = begin; row < end; ++row) {
    const T* d_y = norm.d_y.row<T>(row);
    const T* x = norm.x.row<T>(row);
    T* d_x = norm.d_x.row<T>(row);
    const float rstd = norm.rstd[row];
    const auto factor = hn::Set(F32(), rstd);

    auto dot = hn::Zero(F32());  // <g, xhat>
    for_vectors(columns, [&](int64_t i, int64_t count) HWY_ATTR {
      const auto xhat = hn::Mul(load(x + i, count), factor);
      const auto d = load(d_y + i, count);
      dot = hn::MulAdd(hn::Mul(d, load(weight + i, count)), xhat, dot);
      store(hn::MulAdd(d, xhat, load(d_weight + i, count)), d_weight + i, count);
    });

    const auto mean = hn::Set(F32(), sum_lanes(dot) / static_cast<float>(columns));
    const bool accumulate = norm.accumulate_d_x == Accumulate::yes;
    for_vectors(columns, [&](int64_t i, int64_t count) HWY_ATTR {
      const auto xhat = hn::Mul(load(x + i, count), factor);
      const auto g = hn::Mul(load(d_y + i, count), load(weight + i, count));
      auto gradient = hn::Mul(hn::NegMulAdd(xhat, mean, g), factor);
      if (accumulate) gradient = hn::Add(gradient, load(d_x + i, count));
      store(gradient, d_x + i, count);
    });
  }
}

void rms_norm_forward_target(const RmsNormForward& norm, int64_t begin, int64_t end) {
  with_compute_type(norm.dtype, [&](auto t) {
    with_compute_type(norm.weight_dtype, [&](auto w) { forward_rows<decltype(t), decltype(w)>(norm, begin, end); });
  });
}

void rms_norm_backward_target(const RmsNormBackward& norm, int64_t begin, int64_t end, float* d_weight) {
  with_compute_type(norm.dtype, [&](auto t) {
    with_compute_type(norm.weight_dtype,
                      [&](auto w) { backward_rows<decltype(t), decltype(w)>(norm, begin, end, d_weight); });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace farspan::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace farspan::cpu {

HWY_EXPORT(rms_norm_forward_target);
HWY_EXPORT(rms_norm_backward_target);

void rms_norm_forward(const RmsNormForward& norm, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(rms_norm_forward_target)(norm, begin, end);
}

void rms_norm_backward(const RmsNormBackward& norm, int64_t begin, int64_t end, float* d_weight) {
  HWY_DYNAMIC_DISPATCH(rms_norm_backward_target)(norm, begin, end, d_weight);
}

}  // namespace farspan::cpu
#endif
