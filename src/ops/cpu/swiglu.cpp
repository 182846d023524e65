// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/kernels.h"
#include "ops/operand_checks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/swiglu.cpp"
#include "hwy/foreach_target.h"
// After foreach_target, which sets the target it is compiled for.
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace farspan::cpu {
namespace HWY_NAMESPACE {

HWY_INLINE Floats sigmoid(Floats x) {
  const auto one = hn::Set(F32(), 1.0f);
  return hn::Div(one, hn::Add(one, exponential(hn::Neg(x))));
}

template <typename T>
void forward_rows(const SwiGlu& swiglu, int64_t begin, int64_t end) {
  const int64_t columns = swiglu.out.columns();
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = swiglu.gate_up.row<T>(row);
    const T* up = gate + columns;
    T* y = swiglu.out.row<T>(row);
    for_vectors(columns, [&](int64_t i, int64_t count) HWY_ATTR {
      const auto g = load(gate + i, count);
      store(hn::Mul(hn::Mul(g, sigmoid(g)), load(up + i, count)), y + i, count);
    });
  }
}

template <typename T>
void backward_rows(const SwiGlu& swiglu, int64_t begin, int64_t end) {
  const auto one = hn::Set(F32(), 1.0f);
  const int64_t columns = swiglu.d_y.columns();
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = swiglu.gate_up.row<T>(row);
    const T* up = gate + columns;
    const T* d_y = swiglu.d_y.row<T>(row);
    T* d_gate = swiglu.out.row<T>(row);
    T* d_up = d_gate + columns;
    T* y = swiglu.has_y ? swiglu.y.row<T>(row) : nullptr;
    for_vectors(columns, [&](int64_t i, int64_t count) HWY_ATTR {
      const auto g = load(gate + i, count);
      const auto u = load(up + i, count);
      const auto d = load(d_y + i, count);
      const auto s = sigmoid(g);
      const auto slope = hn::Mul(s, hn::MulAdd(g, hn::Sub(one, s), one));
      store(hn::Mul(hn::Mul(d, u), slope), d_gate + i, count);
      const auto silu = hn::Mul(g, s);
      store(hn::Mul(d, silu), d_up + i, count);
      if (y != nullptr) store(hn::Mul(silu, u), y + i, count);
    });
  }
}

void swiglu_forward_target(const SwiGlu& swiglu, int64_t begin, int64_t end) {
  with_compute_type(swiglu.dtype, [&](auto t) { forward_rows<decltype(t)>(swiglu, begin, end); });
}

void swiglu_backward_target(const SwiGlu& swiglu, int64_t begin, int64_t end) {
  with_compute_type(swiglu.dtype, [&](auto t) { backward_rows<decltype(t)>(swiglu, begin, end); });
}

}  // namespace HWY_NAMESPACE
}  // namespace farspan::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace farspan::cpu {

HWY_EXPORT(swiglu_forward_target);
HWY_EXPORT(swiglu_backward_target);

void swiglu_forward(const SwiGlu& swiglu, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(swiglu_forward_target)(swiglu, begin, end);
}

void swiglu_backward(const SwiGlu& swiglu, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(swiglu_backward_target)(swiglu, begin, end);
}

}  // namespace farspan::cpu
#endif
