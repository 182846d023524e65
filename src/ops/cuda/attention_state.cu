// SPDX-License-Identifier: Apache-2.0
// The two row-wise ops beside attention: an empty running state, and <d_out, out> of every query and head.
#include <cmath>

#include "base/math.h"
#include "ops/cuda/attention_kernels.h"
#include "ops/cuda/attention_launch.cuh"

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

__device__ float widened(float x) { return x; }
__device__ float widened(BFloat16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

// Elements that a lane loads at once.
constexpr int kTogether = 4;
template <typename T>
struct alignas(kTogether * sizeof(T)) Together {
  T of[kTogether];
};

template <typename T>
bool loads_together(const View<const T>& view, int64_t head_size) {
  return head_size % kTogether == 0 && view.token_stride % kTogether == 0 && view.head_stride % kTogether == 0 &&
         reinterpret_cast<uintptr_t>(view.data) % sizeof(Together<T>) == 0;
}

// One warp a (query, head), heads varying fastest.
template <bool kLoadsTogether, typename Out, typename DOut>
__global__ void __launch_bounds__(kThreads) delta_kernel(View<const Out> out, View<const DOut> d_out, float* delta,
                                                         int64_t delta_stride, int64_t queries, int64_t heads,
                                                         int64_t head_size) {
  const int64_t row = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / 32;
  if (row >= queries * heads) return;
  const int64_t query = row / heads, head = row % heads;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Out* const o = out.row(query, head);
  const DOut* const g = d_out.row(query, head);
  float sum = 0;
  if constexpr (kLoadsTogether) {
    for (int64_t d = lane * kTogether; d < head_size; d += 32 * kTogether) {
      const auto a = *reinterpret_cast<const Together<Out>*>(o + d);
      const auto b = *reinterpret_cast<const Together<DOut>*>(g + d);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) sum = fmaf(widened(a.of[i]), widened(b.of[i]), sum);
    }
  } else {
    for (int64_t d = lane; d < head_size; d += 32) sum = fmaf(widened(o[d]), widened(g[d]), sum);
  }
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (lane == 0) delta[head * delta_stride + query] = sum;
}

template <typename Out, typename DOut>
void queue_delta(Device& device, const Tensor& out, const Tensor& d_out, const Tensor& delta) {
  const int64_t rows = out.dim(0) * out.dim(1);
  const View<const Out> outs(out);
  const View<const DOut> d_outs(d_out);
  const auto kernel = loads_together(outs, out.dim(2)) && loads_together(d_outs, out.dim(2))
                          ? delta_kernel<true, Out, DOut>
                          : delta_kernel<false, Out, DOut>;
  launch(kernel, ceil_div(rows, kThreads / 32), kThreads, 0, compute_stream(device), outs, d_outs,
         delta.data<float>(), delta.stride(0), out.dim(0), out.dim(1), out.dim(2));
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
