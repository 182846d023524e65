// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "base/math.h"
#include "ops/cuda/attention_merge.h"
#include "ops/cuda/vector.cuh"

namespace farspan::cuda {
namespace {

constexpr int kThreads = 256;
// (query, head) pairs of a block, heads varying fastest: with 16 heads 8 queries, whose log-sum-exps fill a sector.
constexpr int kRows = 128;

template <typename Out>
struct Merge {
  const BFloat16* partial;
  const float* partial_lse;
  Out* out;
  float* lse;
  int64_t partial_token_stride, partial_head_stride, partial_lse_stride;
  int64_t out_token_stride, out_head_stride, lse_stride;
  int64_t heads, rows, head_size;
  bool begin;
};

// Shares of the old and the new result in the merged one.
struct Weights {
  float state = 1;
  float partial = 0;
};

__device__ Weights merge_lse(float state, float partial, float* merged) {
  if (partial == -INFINITY) {
    *merged = state;
    return {state == -INFINITY ? 0.0f : 1.0f, 0.0f};
  }
  const float larger = fmaxf(state, partial);
  *merged = larger + logf(expf(state - larger) + expf(partial - larger));
  return {expf(state - *merged), expf(partial - *merged)};
}

template <typename Out, int N>
__global__ void __launch_bounds__(kThreads) merge_kernel(const Merge<Out> m) {
  __shared__ Weights weights[kRows];
  const int64_t vectors = m.head_size / N;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kRows; first < m.rows;
       first += static_cast<int64_t>(gridDim.x) * kRows) {
    const int rows = static_cast<int>(min(static_cast<int64_t>(kRows), m.rows - first));
    for (int r = static_cast<int>(threadIdx.x); r < rows; r += kThreads) {
      const int64_t query = (first + r) / m.heads, head = (first + r) % m.heads;
      float* const lse = m.lse + head * m.lse_stride + query;
      const float partial = m.partial_lse[head * m.partial_lse_stride + query];
      weights[r] = merge_lse(m.begin ? -INFINITY : *lse, partial, lse);
    }
    __syncthreads();
    for (int64_t v = threadIdx.x; v < rows * vectors; v += kThreads) {
      const int64_t r = v / vectors, d = v % vectors * N;
      const Weights w = weights[r];
      if (w.partial == 0 && !m.begin) continue;
      const int64_t query = (first + r) / m.heads, head = (first + r) % m.heads;
      float sum[N] = {}, values[N];
      Out* const to = m.out + query * m.out_token_stride + head * m.out_head_stride + d;
      Vector<Out, N> state;
      if (w.state != 0) {
        state.load(to);
        state.get(values);
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] = w.state * values[i];
      }
      if (w.partial != 0) {
        Vector<BFloat16, N> partial;
        partial.load(m.partial + query * m.partial_token_stride + head * m.partial_head_stride + d);
        partial.get(values);
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] = fmaf(w.partial, values[i], sum[i]);
      }
      state.set(sum);
      state.store(to);
    }
    __syncthreads();
  }
}

template <typename Out>
void queue_merge(Device& device, const Tensor& partial, const Tensor& partial_lse, StateUse use, const Tensor& out,
                 const Tensor& lse) {
  const Merge<Out> merge{.partial = partial.data<BFloat16>(),
                         .partial_lse = partial_lse.data<float>(),
                         .out = out.data<Out>(),
                         .lse = lse.data<float>(),
                         .partial_token_stride = partial.stride(0),
                         .partial_head_stride = partial.stride(1),
                         .partial_lse_stride = partial_lse.stride(0),
                         .out_token_stride = out.stride(0),
                         .out_head_stride = out.stride(1),
                         .lse_stride = lse.stride(0),
                         .heads = out.dim(1),
                         .rows = out.dim(0) * out.dim(1),
                         .head_size = out.dim(2),
                         .begin = use == StateUse::begin};
  if (merge.rows == 0) return;
  const unsigned int blocks = grid_size(ceil_div(merge.rows, int64_t{kRows}));
  if (holds_vectors(partial, 8) && holds_vectors(out, 8))
    merge_kernel<Out, 8><<<blocks, kThreads, 0, compute_stream(device)>>>(merge);
  else
    merge_kernel<Out, 1><<<blocks, kThreads, 0, compute_stream(device)>>>(merge);
  FARSPAN_CUDA_LAUNCHED();
}

}  // namespace

void attention_merge(Device& device, const Tensor& partial, const Tensor& partial_lse, StateUse use, const Tensor& out,
                     const Tensor& lse) {
  if (out.dtype() == DType::f32)
    queue_merge<float>(device, partial, partial_lse, use, out, lse);
  else
    queue_merge<BFloat16>(device, partial, partial_lse, use, out, lse);
}

}  // namespace farspan::cuda
