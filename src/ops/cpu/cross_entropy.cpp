// SPDX-License-Identifier: Apache-2.0
// One row at a time: its maximum (from memory), the sum of exponentials and the gradient (from cache).
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/cpu/kernels.h"
#include "ops/operand_checks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/cross_entropy.cpp"
#include "hwy/foreach_target.h"
// After foreach_target, which sets the target it is compiled for.
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace farspan::cpu {
namespace HWY_NAMESPACE {

// Partial sums are closed in fp64 after this many elements, so a vocabulary of any size costs no accuracy.
constexpr int64_t kSumBlock = 2048;

// NaN may be lost here; it returns through the sum of exponentials.
float row_maximum(const float* x, int64_t columns) {
  auto first = hn::Set(F32(), -std::numeric_limits<float>::infinity());
  auto second = first;
  int64_t i = 0;
  for (const int64_t step = lanes(); i + 2 * step <= columns; i += 2 * step) {
    first = hn::Max(first, load(x + i));
    second = hn::Max(second, load(x + i + step));
  }
  float maximum = hn::GetLane(hn::MaxOfLanes(F32(), hn::Max(first, second)));
  for (; i < columns; ++i) maximum = x[i] > maximum ? x[i] : maximum;
  return maximum;
}

// Sum of exp(x - maximum); the exponentials are kept in `kept` unless it is null (it may be x).
double sum_of_exponentials(const float* x, float maximum, int64_t columns, float* kept) {
  const auto shift = hn::Set(F32(), maximum);
  double total = 0;
  for (int64_t start = 0; start < columns; start += kSumBlock) {
    const int64_t size = std::min(kSumBlock, columns - start);
    auto sum = hn::Zero(F32());
    for_vectors(size, [&](int64_t i, int64_t count) HWY_ATTR {
      auto e = exponential(hn::Sub(load(x + start + i, count), shift));
      if (kept != nullptr) store(e, kept + start + i, count);
      if (count < lanes()) e = hn::IfThenElseZero(hn::FirstN(F32(), static_cast<size_t>(count)), e);
      sum = hn::Add(sum, e);
    });
    total += static_cast<double>(sum_lanes(sum));
  }
  return total;
}

void zero_row(const RowView& rows, int64_t row, DType dtype) {
  if (rows.columns() == 0) return;  // a rank without vocabulary has no memory for it
  std::memset(rows.raw(row, 0), 0, static_cast<size_t>(rows.columns() * size_of(dtype)));
}

// Logarithm of the sum of exponentials of a row that may be empty or hold nothing of weight: then -inf.
double log_sum_exp(const float* x, int64_t columns) {
  const float maximum = row_maximum(x, columns);
  if (maximum == -std::numeric_limits<float>::infinity()) {
    double sum = static_cast<double>(maximum);
    for (int64_t i = 0; i < columns; ++i) sum += static_cast<double>(x[i]);  // -inf, or NaN if there is one
    return sum;
  }
  return static_cast<double>(maximum) + std::log(sum_of_exponentials(x, maximum, columns, nullptr));
}

void cross_entropy_target(const CrossEntropy& loss, int64_t begin, int64_t end) {
  using Gradient = CrossEntropy::Gradient;
  const int64_t columns = loss.logits.columns();
  for (int64_t row = begin; row < end; ++row) {
    const int32_t target = loss.targets[row];
    if (target < 0) {
      loss.token_loss[row] = 0;
      if (loss.gradient != Gradient::none)
        zero_row(loss.d_logits, row, loss.gradient == Gradient::f32 ? DType::f32 : DType::bf16);
      continue;
    }
    const float* logits = loss.logits.row<float>(row);
    const double target_logit = static_cast<double>(logits[target]);  // before the gradient may overwrite it
    const float maximum = row_maximum(logits, columns);
    float* kept = loss.gradient == Gradient::f32 ? loss.d_logits.row<float>(row) : nullptr;
    const double sum = sum_of_exponentials(logits, maximum, columns, kept);
    const double shifted_target = target_logit - static_cast<double>(maximum);
    loss.token_loss[row] = static_cast<float>(std::log(sum) - shifted_target);

    if (loss.gradient == Gradient::none) continue;
    const auto factor = hn::Set(F32(), static_cast<float>(loss.gradient_scale / sum));
    const float at_target = static_cast<float>((std::exp(shifted_target) / sum - 1.0) * loss.gradient_scale);
    if (loss.gradient == Gradient::f32) {
      for_vectors(columns, [&](int64_t i, int64_t count)
                               HWY_ATTR { store(hn::Mul(load(kept + i, count), factor), kept + i, count); });
      kept[target] = at_target;
    } else {
      BFloat16* d_logits = loss.d_logits.row<BFloat16>(row);
      const auto shift = hn::Set(F32(), maximum);
      for_vectors(columns, [&](int64_t i, int64_t count) HWY_ATTR {
        store(hn::Mul(exponential(hn::Sub(load(logits + i, count), shift)), factor), d_logits + i, count);
      });
      d_logits[target] = to_bfloat16(at_target);
    }
  }
}

void statistics_target(const VocabularyStatistics& statistics, int64_t begin, int64_t end) {
  const int64_t columns = statistics.logits.columns();
  for (int64_t row = begin; row < end; ++row) {
    const int64_t target = statistics.targets[row];
    const int64_t column = target - statistics.first_id;
    const float* logits = statistics.logits.row<float>(row);
    statistics.lse[row] = target < 0 ? 0 : static_cast<float>(log_sum_exp(logits, columns));
    statistics.target_logit[row] = target >= 0 && column >= 0 && column < columns ? logits[column] : 0;
  }
}

template <typename T>
void gradient_row(const VocabularyGradient& gradient, int64_t row) {
  const float* logits = gradient.logits.row<float>(row);
  T* d_logits = gradient.d_logits.row<T>(row);
  const int64_t columns = gradient.logits.columns();
  const int64_t column = gradient.targets[row] - gradient.first_id;
  const bool here = column >= 0 && column < columns;
  const float target_logit = here ? logits[column] : 0;  // before it may be overwritten
  const auto shift = hn::Set(F32(), gradient.lse[row]);
  const auto factor = hn::Set(F32(), static_cast<float>(gradient.gradient_scale));
  for_vectors(columns, [&](int64_t i, int64_t count) HWY_ATTR {
    store(hn::Mul(exponential(hn::Sub(load(logits + i, count), shift)), factor), d_logits + i, count);
  });
  if (!here) return;
  const double probability = std::exp(static_cast<double>(target_logit) - static_cast<double>(gradient.lse[row]));
  d_logits[column] = from_float<T>(static_cast<float>((probability - 1.0) * gradient.gradient_scale));
}

void gradient_target(const VocabularyGradient& gradient, int64_t begin, int64_t end) {
  with_compute_type(gradient.dtype, [&](auto element) {
    for (int64_t row = begin; row < end; ++row)
      if (gradient.targets[row] < 0)
        zero_row(gradient.d_logits, row, gradient.dtype);
      else
        gradient_row<decltype(element)>(gradient, row);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace farspan::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace farspan::cpu {

HWY_EXPORT(cross_entropy_target);
HWY_EXPORT(statistics_target);
HWY_EXPORT(gradient_target);

void cross_entropy(const CrossEntropy& loss, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(cross_entropy_target)(loss, begin, end);
}

void vocabulary_statistics(const VocabularyStatistics& statistics, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(statistics_target)(statistics, begin, end);
}

void vocabulary_gradient(const VocabularyGradient& gradient, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(gradient_target)(gradient, begin, end);
}

}  // namespace farspan::cpu
#endif
