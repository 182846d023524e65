// SPDX-License-Identifier: Apache-2.0
#include "ops/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>

#include "ops/cpu/kernels.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/scratch.h"
#include "ops/operand_checks.h"

namespace farspan {
namespace {

// One number a token.
void check_per_token(std::string_view op, std::string_view name, const Tensor& tensor, DType dtype, int64_t tokens) {
  check_dtype(op, name, tensor, dtype);
  check_shape(op, name, tensor, Shape({tokens}));
  check_contiguous(op, name, tensor);
}

void check_gradient(std::string_view op, const Tensor& d_logits, const Tensor& logits) {
  check_compute_dtype(op, "d_logits", d_logits);
  check_shape(op, "d_logits", d_logits, logits.shape());
  check_dense_rows(op, "d_logits", d_logits);
}

void check_logits_and_targets(std::string_view op, const Tensor& logits, const Tensor& targets) {
  check_dtype(op, "logits", logits, DType::f32);
  check_rank(op, "logits", logits, 2, 2);
  check_dense_rows(op, "logits", logits);
  check_per_token(op, "targets", targets, DType::i32, logits.dim(0));
}

void check_part(std::string_view op, const Tensor& logits, const VocabularyPart& part) {
  FARSPAN_CHECK(part.first_id >= 0 && part.first_id + logits.dim(1) <= part.vocabulary,
                "{}: ids {} up to {} are not in a vocabulary of {}", op, part.first_id, part.first_id + logits.dim(1),
                part.vocabulary);
}

void check_targets(std::string_view op, const Tensor& targets, int64_t vocabulary) {
  const int32_t* ids = targets.data<int32_t>();
  for (int64_t i = 0; i < targets.dim(0); ++i)
    if (ids[i] < -1 || ids[i] >= vocabulary)
      throw DataError(
          fmt::format("{}: target {} has id {}; expected 0 to {}, or -1 to ignore it", op, i, ids[i], vocabulary - 1));
}

double bytes_of(std::initializer_list<Tensor> operands) {
  double bytes = 0;
  for (const Tensor& operand : operands)
    if (operand.defined()) bytes += static_cast<double>(operand.bytes());
  return bytes;
}

// A token's log-sum-exp over all ranks; NaN when any rank's is, or when no logit of any rank carries weight.
double combined_lse(const float* lse, int64_t rank_stride, int64_t ranks) {
  double maximum = -std::numeric_limits<double>::infinity();
  for (int64_t r = 0; r < ranks; ++r) maximum = std::max(maximum, static_cast<double>(lse[r * rank_stride]));
  double sum = 0;
  for (int64_t r = 0; r < ranks; ++r) sum += std::exp(static_cast<double>(lse[r * rank_stride]) - maximum);
  return maximum + std::log(sum);
}

}  // namespace

void cross_entropy(Device& device, Tensor logits, const Tensor& targets, double gradient_scale, Tensor token_loss,
                   Tensor d_logits) {
  constexpr std::string_view op = "cross_entropy";
  check_logits_and_targets(op, logits, targets);
  check_per_token(op, "token_loss", token_loss, DType::f32, logits.dim(0));
  if (d_logits.defined()) check_gradient(op, d_logits, logits);
  const double flops = (d_logits.defined() ? 6.0 : 4.0) * static_cast<double>(logits.numel());
  device.run({op, OpClass::memory, flops, bytes_of({logits, d_logits, targets, token_loss})}, [&] {
    if (device.on_cuda()) return cuda::cross_entropy(device, logits, targets, gradient_scale, token_loss, d_logits);
    check_targets(op, targets, logits.dim(1));
    using Gradient = cpu::CrossEntropy::Gradient;
    cpu::CrossEntropy loss{cpu::RowView(logits), targets.data<int32_t>(), gradient_scale, token_loss.data<float>(), {},
                           Gradient::none};
    if (d_logits.defined()) {
      loss.d_logits = cpu::RowView(d_logits);
      loss.gradient = d_logits.dtype() == DType::f32 ? Gradient::f32 : Gradient::bf16;
    }
    parallel_for(device, logits.dim(0), cpu::row_grain(logits.dim(1)),
                 [&](int64_t begin, int64_t end) { cpu::cross_entropy(loss, begin, end); });
  });
}

void vocabulary_statistics(Device& device, const Tensor& logits, const Tensor& targets, const VocabularyPart& part,
                           Tensor statistics) {
  constexpr std::string_view op = "vocabulary_statistics";
  check_logits_and_targets(op, logits, targets);
  check_part(op, logits, part);
  check_dtype(op, "statistics", statistics, DType::f32);
  check_shape(op, "statistics", statistics, Shape({2, logits.dim(0)}));
  check_dense_rows(op, "statistics", statistics);
  const double flops = 3.0 * static_cast<double>(logits.numel());
  device.run({op, OpClass::memory, flops, bytes_of({logits, targets, statistics})}, [&] {
    if (device.on_cuda()) return cuda::vocabulary_statistics(device, logits, targets, part, statistics);
    check_targets(op, targets, part.vocabulary);
    float* const lse = statistics.data<float>();
    const cpu::VocabularyStatistics rows{cpu::RowView(logits), targets.data<int32_t>(), part.first_id, lse,
                                         lse + statistics.stride(0)};
    parallel_for(device, logits.dim(0), cpu::row_grain(logits.dim(1)),
                 [&](int64_t begin, int64_t end) { cpu::vocabulary_statistics(rows, begin, end); });
  });
}

void combine_statistics(Device& device, const Tensor& all, const Tensor& targets, Tensor lse, Tensor token_loss) {
  constexpr std::string_view op = "combine_statistics";
  check_dtype(op, "all", all, DType::f32);
  check_rank(op, "all", all, 3, 3);
  check_dense_rows(op, "all", all);
  const int64_t ranks = all.dim(0);
  const int64_t tokens = all.dim(2);
  check_shape(op, "all", all, Shape({ranks, 2, tokens}));
  check_per_token(op, "targets", targets, DType::i32, tokens);
  check_per_token(op, "lse", lse, DType::f32, tokens);
  check_per_token(op, "token_loss", token_loss, DType::f32, tokens);
  const double flops = 3.0 * static_cast<double>(all.numel());
  device.run({op, OpClass::memory, flops, bytes_of({all, targets, lse, token_loss})}, [&] {
    if (device.on_cuda()) return cuda::combine_statistics(device, all, targets, lse, token_loss);
    const int32_t* const ids = targets.data<int32_t>();
    const float* const lses = all.data<float>();
    const float* const target_logits = lses + all.stride(1);
    const int64_t rank_stride = all.stride(0);
    float* const total = lse.data<float>();
    float* const loss = token_loss.data<float>();
    // Two exponentials of some 20 ns a token and rank: a few hundred repay a thread.
    parallel_for(device, tokens, 512, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const bool counts = ids[t] >= 0;
        const double sum = counts ? combined_lse(lses + t, rank_stride, ranks) : 0;
        double target_logit = 0;
        for (int64_t r = 0; counts && r < ranks; ++r)
          target_logit += static_cast<double>(target_logits[r * rank_stride + t]);
        total[t] = static_cast<float>(sum);
        loss[t] = static_cast<float>(sum - target_logit);
      }
    });
  });
}

void vocabulary_gradient(Device& device, Tensor logits, const Tensor& targets, const VocabularyPart& part,
                         const Tensor& lse, double gradient_scale, Tensor d_logits) {
  constexpr std::string_view op = "vocabulary_gradient";
  check_logits_and_targets(op, logits, targets);
  check_part(op, logits, part);
  check_per_token(op, "lse", lse, DType::f32, logits.dim(0));
  check_gradient(op, d_logits, logits);
  const double flops = 3.0 * static_cast<double>(logits.numel());
  device.run({op, OpClass::memory, flops, bytes_of({logits, targets, lse, d_logits})}, [&] {
    if (device.on_cuda())
      return cuda::vocabulary_gradient(device, logits, targets, part, lse, gradient_scale, d_logits);
    check_targets(op, targets, part.vocabulary);
    const cpu::VocabularyGradient rows{cpu::RowView(logits), targets.data<int32_t>(), part.first_id,
                                       lse.data<float>(),    gradient_scale,          cpu::RowView(d_logits),
                                       d_logits.dtype()};
    parallel_for(device, logits.dim(0), cpu::row_grain(logits.dim(1)),
                 [&](int64_t begin, int64_t end) { cpu::vocabulary_gradient(rows, begin, end); });
  });
}

void token_loss_sum(Device& device, const Tensor& token_loss, Tensor sum) {
  constexpr std::string_view op = "token_loss_sum";
  check_rank(op, "token_loss", token_loss, 1, 1);
  check_per_token(op, "token_loss", token_loss, DType::f32, token_loss.dim(0));
  check_dtype(op, "sum", sum, DType::f64);
  check_shape(op, "sum", sum, Shape({1}));
  const double elements = static_cast<double>(token_loss.numel());
  const int64_t scratch = device.targets_cuda() ? cuda::partial_sums_scratch() : 0;
  device.run({op, OpClass::memory, elements, 4.0 * elements + 16, scratch}, [&] {
    if (device.on_cuda()) return cuda::token_loss_sum(device, token_loss, sum);
    const float* loss = token_loss.data<float>();
    double total = 0;
    for (int64_t i = 0; i < token_loss.dim(0); ++i) total += static_cast<double>(loss[i]);
    *sum.data<double>() += total;
  });
}

}  // namespace farspan
