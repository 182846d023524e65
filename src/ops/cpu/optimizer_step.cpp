// SPDX-License-Identifier: Apache-2.0
// The weight is changed by one subtraction, w - (lr decay w + lr update): the update does not depend on w, so this is
// the decay followed by the update, and the small product lr * decay is not first lost in 1 - lr * decay.
#include <cmath>

#include "ops/cpu/kernels.h"
#include "ops/operand_checks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/optimizer_step.cpp"
#include "hwy/foreach_target.h"
// After foreach_target, which sets the target it is compiled for.
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace farspan::cpu {
namespace HWY_NAMESPACE {

HWY_INLINE Floats broadcast(double value) { return hn::Set(F32(), static_cast<float>(value)); }

template <typename Copy>
void adamw_range(const AdamWStep& adamw, const float* gradient, float* weight, float* m, float* v, Copy* copy,
                 int64_t n) {
  const double step = static_cast<double>(adamw.step);
  const auto scale = broadcast(adamw.gradient_scale);
  const auto decay = broadcast(adamw.lr * adamw.weight_decay);
  const auto beta1 = broadcast(adamw.beta1), rest1 = broadcast(1.0 - adamw.beta1);
  const auto beta2 = broadcast(adamw.beta2), rest2 = broadcast(1.0 - adamw.beta2);
  const auto rate = broadcast(adamw.lr / (1.0 - std::pow(adamw.beta1, step)));
  const auto correct2 = broadcast(1.0 / (1.0 - std::pow(adamw.beta2, step)));
  const auto epsilon = broadcast(adamw.epsilon);

  for_vectors(n, [&](int64_t i, int64_t count) HWY_ATTR {
    const auto g = hn::Mul(load(gradient + i, count), scale);
    const auto first = hn::MulAdd(beta1, load(m + i, count), hn::Mul(rest1, g));
    const auto second = hn::MulAdd(beta2, load(v + i, count), hn::Mul(hn::Mul(rest2, g), g));
    store(first, m + i, count);
    store(second, v + i, count);
    const auto update = hn::Div(hn::Mul(rate, first), hn::Add(hn::Sqrt(hn::Mul(second, correct2)), epsilon));
    const auto w = load(weight + i, count);
    const auto next = hn::Sub(w, hn::MulAdd(decay, w, update));
    store(next, weight + i, count);
    if (copy != nullptr) store(next, copy + i, count);
  });
}

template <typename Copy>
void sgd_range(const SgdStep& sgd, const float* gradient, float* weight, Copy* copy, int64_t n) {
  const auto decay = broadcast(sgd.lr * sgd.weight_decay);
  const auto rate = broadcast(sgd.lr * sgd.gradient_scale);
  for_vectors(n, [&](int64_t i, int64_t count) HWY_ATTR {
    const auto w = load(weight + i, count);
    const auto next = hn::Sub(w, hn::MulAdd(decay, w, hn::Mul(rate, load(gradient + i, count))));
    store(next, weight + i, count);
    if (copy != nullptr) store(next, copy + i, count);
  });
}

void adamw_target(const AdamWStep& adamw, const float* gradient, float* weight, float* m, float* v, WeightCopy copy,
                  int64_t n) {
  with_compute_type(copy.dtype, [&](auto element) {
    adamw_range(adamw, gradient, weight, m, v, static_cast<decltype(element)*>(copy.data), n);
  });
}

void sgd_target(const SgdStep& sgd, const float* gradient, float* weight, WeightCopy copy, int64_t n) {
  with_compute_type(copy.dtype, [&](auto element) {
    sgd_range(sgd, gradient, weight, static_cast<decltype(element)*>(copy.data), n);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace farspan::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace farspan::cpu {

HWY_EXPORT(adamw_target);
HWY_EXPORT(sgd_target);

void adamw_elements(const AdamWStep& adamw, const float* gradient, float* weight, float* m, float* v, WeightCopy copy,
                    int64_t n) {
  HWY_DYNAMIC_DISPATCH(adamw_target)(adamw, gradient, weight, m, v, copy, n);
}

void sgd_elements(const SgdStep& sgd, const float* gradient, float* weight, WeightCopy copy, int64_t n) {
  HWY_DYNAMIC_DISPATCH(sgd_target)(sgd, gradient, weight, copy, n);
}

}  // namespace farspan::cpu
#endif
