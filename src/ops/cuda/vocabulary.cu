// SPDX-License-Identifier: Apache-2.0
// Cross-entropy over a vocabulary dealt to several ranks (ops/cross_entropy.h): a rank's statistics, their combination,
// and the gradient of the rank's own logits.
#include "base/math.h"
#include "ops/cuda/cross_entropy.cuh"
#include "ops/cuda/ops.h"

namespace farspan::cuda {
namespace {

constexpr int kThreads = 512;
// Vectors of four of each thread whose loads are under way together.
constexpr int kGroup = 4;

struct Part {
  const float* logits;
  const int32_t* targets;
  int64_t first_id, columns, vocabulary;  // the last of all ranks together
  int64_t stride;

  __device__ __forceinline__ bool counts(int32_t target) const { return target >= 0 && target < vocabulary; }
  // The target's column, if this rank holds it; else -1.
  __device__ __forceinline__ int64_t column_of(int32_t target) const {
    const int64_t column = target - first_id;
    return column >= 0 && column < columns ? column : -1;
  }
};

Part part_of(const Tensor& logits, const Tensor& targets, const VocabularyPart& part) {
  return {.logits = logits.data<float>(),
          .targets = targets.data<int32_t>(),
          .first_id = part.first_id,
          .columns = logits.dim(1),
          .vocabulary = part.vocabulary,
          .stride = logits.stride(0)};
}

// A block per row.
template <bool kVectors>
__global__ void __launch_bounds__(kThreads) statistics_of_rows(const Part part, float* lse, float* target_logit) {
  __shared__ ExponentialSum of_warps[kThreads / kWarp];
  const int64_t row = blockIdx.x;
  const int32_t target = part.targets[row];
  if (!part.counts(target)) {
    if (threadIdx.x == 0) lse[row] = target_logit[row] = 0;
    return;
  }
  const float* const logits = part.logits + row * part.stride;
  ExponentialSum all;
  for (int64_t i = threadIdx.x * 4; i < part.columns; i += kThreads * 4 * kGroup) {
    float x[kGroup][4];
#pragma unroll
    for (int g = 0; g < kGroup; ++g)
      load_four<kVectors>(logits, i + g * kThreads * 4, part.columns, x[g], kMinusInfinity);
    all.add(reinterpret_cast<const float(&)[kGroup * 4]>(x));
  }
  all.combine_block<kThreads / kWarp>(of_warps);
  if (threadIdx.x != 0) return;
  lse[row] = static_cast<float>(static_cast<double>(all.maximum) + static_cast<double>(logf(all.sum)));
  const int64_t column = part.column_of(target);
  target_logit[row] = column >= 0 ? logits[column] : 0;
}

struct Statistics {
  const float* all;  // (ranks, 2, tokens)
  int64_t ranks, tokens, rank_stride, kind_stride;
};

// A thread per token; the ranks in order.
__global__ void __launch_bounds__(kThreads) combine_ranks(const Statistics statistics, const int32_t* targets,
                                                          float* lse, float* token_loss) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (t >= statistics.tokens) return;
  if (targets[t] < 0) {
    lse[t] = token_loss[t] = 0;
    return;
  }
  const float* const lses = statistics.all + t;
  double maximum = static_cast<double>(kMinusInfinity);
  for (int64_t r = 0; r < statistics.ranks; ++r)
    maximum = fmax(maximum, static_cast<double>(lses[r * statistics.rank_stride]));
  double sum = 0, target_logit = 0;
  for (int64_t r = 0; r < statistics.ranks; ++r) {
    const float* const of_rank = lses + r * statistics.rank_stride;
    sum += exp(static_cast<double>(*of_rank) - maximum);
    target_logit += static_cast<double>(of_rank[statistics.kind_stride]);
  }
  const double total = maximum + log(sum);
  lse[t] = static_cast<float>(total);
  token_loss[t] = static_cast<float>(total - target_logit);
}

// A block per row and piece of kThreads * kGroup vectors of its columns.
template <typename T, bool kVectors>
__global__ void __launch_bounds__(kThreads) gradient_of_rows(const Part part, const float* lse, float scale,
                                                             T* all_d_logits, int64_t d_stride, bool d_vectors) {
  const int64_t row = blockIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * (kThreads * 4 * kGroup) + threadIdx.x * 4;
  const int32_t target = part.targets[row];
  T* const d_logits = all_d_logits + row * d_stride;
  float x[kGroup][4] = {};
  if (part.counts(target)) {
    const int64_t column = part.column_of(target);
    const float shift = lse[row];
#pragma unroll
    for (int g = 0; g < kGroup; ++g)
      load_four<kVectors>(part.logits + row * part.stride, first + g * kThreads * 4, part.columns, x[g], 0);
#pragma unroll
    for (int g = 0; g < kGroup; ++g)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float probability = exponential(x[g][e] - shift);
        x[g][e] = (first + g * kThreads * 4 + e == column ? probability - 1 : probability) * scale;
      }
  }
#pragma unroll
  for (int g = 0; g < kGroup; ++g)
    store_four(d_logits, first + g * kThreads * 4, part.columns, d_vectors, x[g]);
}

template <typename T>
void run_gradient(Device& device, const Part& part, const Tensor& lse, double scale, const Tensor& d_logits,
                  bool vectors) {
  const auto kernel = vectors ? gradient_of_rows<T, true> : gradient_of_rows<T, false>;
  const dim3 grid(static_cast<unsigned>(d_logits.dim(0)),
                  static_cast<unsigned>(ceil_div(part.columns, kThreads * 4 * kGroup)));
  kernel<<<grid, kThreads, 0, compute_stream(device)>>>(part, lse.data<float>(), static_cast<float>(scale),
                                                        d_logits.data<T>(), d_logits.stride(0),
                                                        rows_hold_fours(d_logits));
  FARSPAN_CUDA_LAUNCHED();
}

}  // namespace

void vocabulary_statistics(Device& device, const Tensor& logits, const Tensor& targets, const VocabularyPart& part,
                           const Tensor& statistics) {
  if (logits.dim(0) == 0) return;
  const auto kernel = rows_hold_fours(logits) ? statistics_of_rows<true> : statistics_of_rows<false>;
  float* const lse = statistics.data<float>();
  kernel<<<static_cast<unsigned>(logits.dim(0)), kThreads, 0, compute_stream(device)>>>(
      part_of(logits, targets, part), lse, lse + statistics.stride(0));
  FARSPAN_CUDA_LAUNCHED();
}

void combine_statistics(Device& device, const Tensor& all, const Tensor& targets, const Tensor& lse,
                        const Tensor& token_loss) {
  if (all.dim(2) == 0) return;
  const Statistics statistics = {.all = all.data<float>(),
                                 .ranks = all.dim(0),
                                 .tokens = all.dim(2),
                                 .rank_stride = all.stride(0),
                                 .kind_stride = all.stride(1)};
  combine_ranks<<<grid_size(ceil_div(all.dim(2), kThreads)), kThreads, 0, compute_stream(device)>>>(
      statistics, targets.data<int32_t>(), lse.data<float>(), token_loss.data<float>());
  FARSPAN_CUDA_LAUNCHED();
}

void vocabulary_gradient(Device& device, const Tensor& logits, const Tensor& targets, const VocabularyPart& part,
                         const Tensor& lse, double gradient_scale, const Tensor& d_logits) {
  if (d_logits.numel() == 0) return;
  const Part own = part_of(logits, targets, part);
  const bool vectors = rows_hold_fours(logits);
  if (d_logits.dtype() == DType::f32)
    run_gradient<float>(device, own, lse, gradient_scale, d_logits, vectors);
  else
    run_gradient<BFloat16>(device, own, lse, gradient_scale, d_logits, vectors);
}

}  // namespace farspan::cuda
