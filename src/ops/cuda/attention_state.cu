// SPDX-License-Identifier: Apache-2.0
// The two row-wise ops beside attention: an empty running state, and <d_out, out> of every query and head.
#include <cmath>

#include "base/math.h"
#include "ops/cuda/attention_kernels.h"
#include "ops/cuda/attention_launch.cuh"
#include "ops/cuda/vector.cuh"

namespace farspan::cuda {
namespace {

constexpr int kThreads = 256;

// (tokens, heads, D), last stride 1.
template <typename T>
struct View {
  T* data;
  int64_t token_stride, head_stride;

  explicit View(const Tensor& x) : data(static_cast<T*>(x.raw())), token_stride(x.stride(0)), head_stride(x.stride(1)) {}
  __device__ T* row(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// One warp a (query, head), heads varying fastest.
__global__ void __launch_bounds__(kThreads)
    state_init_kernel(View<float> out, float* lse, int64_t lse_stride, int64_t queries, int64_t heads, int64_t head_size) {
  const int64_t row = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / 32;
  if (row >= queries * heads) return;
  const int64_t query = row / heads, head = row % heads;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) lse[head * lse_stride + query] = -INFINITY;
  for (int64_t d = lane; d < head_size; d += 32) out.row(query, head)[d] = 0;
}

constexpr int kRowsOfThread = 4;  // at once, so that enough is under way

// A block takes one head of kThreads / lanes * kRowsOfThread queries that follow each other, `lanes` (a power of two up to a
// warp) threads a query.
template <typename Out, typename DOut, int N>
__global__ void __launch_bounds__(kThreads)
    delta_kernel(View<const Out> out, View<const DOut> d_out, float* delta, int64_t delta_stride, int64_t queries,
                 int heads, int head_size, int lanes) {
  let_next_start();
  await_previous();
  __shared__ float sums[kThreads * kRowsOfThread];
  const int head = static_cast<int>(blockIdx.x) % heads;
  const int together = kThreads / lanes, tile = together * kRowsOfThread;
  const int64_t first = static_cast<int64_t>(static_cast<int>(blockIdx.x) / heads) * tile;
  const int row = static_cast<int>(threadIdx.x) / lanes, lane = static_cast<int>(threadIdx.x) % lanes;
  float sum[kRowsOfThread] = {};
  for (int d = lane * N; d < head_size; d += lanes * N) {
    Vector<Out, N> o[kRowsOfThread];
    Vector<DOut, N> g[kRowsOfThread];
#pragma unroll
    for (int r = 0; r < kRowsOfThread; ++r) {
      const int64_t query = first + r * together + row;
      o[r].clear();
      g[r].clear();
      if (query >= queries) continue;
      o[r].load_once(out.row(query, head) + d);
      g[r].load_once(d_out.row(query, head) + d);
    }
#pragma unroll
    for (int r = 0; r < kRowsOfThread; ++r) {
      float a[N], b[N];
      o[r].get(a);
      g[r].get(b);
#pragma unroll
      for (int i = 0; i < N; ++i) sum[r] = fmaf(a[i], b[i], sum[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRowsOfThread; ++r) {
    sum[r] = sum_lanes(sum[r], lanes);
    if (lane == 0) sums[r * together + row] = sum[r];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < tile && first + i < queries; i += kThreads)
    delta[head * delta_stride + first + i] = sums[i];
}

template <int N, typename Out, typename DOut>
void queue_delta(Device& device, const Tensor& out, const Tensor& d_out, const Tensor& delta) {
  const int head_size = static_cast<int>(out.dim(2)), heads = static_cast<int>(out.dim(1));
  int lanes = 1;
  while (lanes < kWarp && lanes * N < head_size) lanes *= 2;
  const int64_t tiles = ceil_div(out.dim(0), kThreads / lanes * kRowsOfThread);
  launch(Start::early, delta_kernel<Out, DOut, N>, checked_mul(tiles, heads), kThreads, 0, compute_stream(device),
         View<const Out>(out), View<const DOut>(d_out), delta.data<float>(), delta.stride(0), out.dim(0), heads,
         head_size, lanes);
}

template <typename Out, typename DOut>
void queue_delta(Device& device, const Tensor& out, const Tensor& d_out, const Tensor& delta) {
  constexpr int N = std::max(kVectorElements<Out>, kVectorElements<DOut>);
  if (holds_vectors(out, N) && holds_vectors(d_out, N)) return queue_delta<N, Out, DOut>(device, out, d_out, delta);
  queue_delta<1, Out, DOut>(device, out, d_out, delta);
}

}  // namespace

void attention_state_init(Device& device, const Tensor& out, const Tensor& lse) {
  const int64_t rows = out.dim(0) * out.dim(1);
  launch(state_init_kernel, ceil_div(rows, kThreads / 32), kThreads, 0, compute_stream(device), View<float>(out),
         lse.data<float>(), lse.stride(0), out.dim(0), out.dim(1), out.dim(2));
}

void attention_delta(Device& device, const Tensor& out, const Tensor& d_out, const Tensor& delta) {
  if (out.dtype() == DType::f32) {
    if (d_out.dtype() == DType::f32) return queue_delta<float, float>(device, out, d_out, delta);
    return queue_delta<float, BFloat16>(device, out, d_out, delta);
  }
  if (d_out.dtype() == DType::f32) return queue_delta<BFloat16, float>(device, out, d_out, delta);
  queue_delta<BFloat16, BFloat16>(device, out, d_out, delta);
}

}  // namespace farspan::cuda
