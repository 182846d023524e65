// SPDX-License-Identifier: Apache-2.0
#include "ops/cuda/each_vector.cuh"
#include "ops/cuda/early_launch.cuh"
#include "ops/cuda/ops.h"
#include "ops/cuda/partial_rows.h"
#include "ops/cuda/scratch.h"
#include "ops/operand_checks.h"

namespace farspan::cuda {
namespace {

template <typename Y>
struct AddBias {
  template <int N>
  using Held = Vector<Y, N>;

  AnyFloats bias;
  Y* y;

  template <int N>
  __device__ Held<N> load(const Place<2>& place) const {
    Held<N> held;
    held.load(y + place.at[1]);
    return held;
  }
  template <int N>
  __device__ void finish(const Place<2>& place, const Held<N>& held) const {
    float sum[N], added[N];
    held.get(sum);
    bias.get(place.at[0], added);
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] += added[i];
    Vector<Y, N> result;
    result.set(sum);
    result.store(y + place.at[1]);
  }
};

constexpr int kRowThreads = 8;  // warps of a block, which take rows in turn

// Block (x, y) sums a y-th part of the rows, in the columns of its kWarp vectors.
template <typename T, int N>
__global__ void __launch_bounds__(kWarp* kRowThreads)
    column_sums_kernel(const T* d_y, int64_t rows, int64_t columns, int64_t stride, float* partial) {
  let_next_start();
  await_previous();
  __shared__ float sums[kRowThreads][kWarp * N];
  const int64_t begin = rows * blockIdx.y / gridDim.y, end = rows * (blockIdx.y + 1) / gridDim.y;
  const int64_t block_column = int64_t{blockIdx.x} * kWarp * N;
  const int64_t column = block_column + threadIdx.x * N;
  float sum[N] = {};
  if (column < columns) {
#pragma unroll 4
    for (int64_t row = begin + threadIdx.y; row < end; row += kRowThreads) {
      Vector<T, N> vector;
      float values[N];
      vector.load_once(d_y + row * stride + column);
      vector.get(values);
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += values[i];
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) sums[threadIdx.y][threadIdx.x * N + i] = sum[i];
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.y * kWarp + threadIdx.x);
  if (thread >= kWarp * N || block_column + thread >= columns) return;
  float total = sums[0][thread];
#pragma unroll
  for (int i = 1; i < kRowThreads; ++i) total += sums[i][thread];
  partial[blockIdx.y * columns + block_column + thread] = total;
}

template <typename T, int N>
void launch_column_sums(cudaStream_t stream, const Tensor& d_y, int64_t parts, float* partial) {
  const dim3 grid(grid_size(ceil_div(d_y.dim(1), kWarp * N)), static_cast<unsigned int>(parts));
  launch_kernel(Start::early, column_sums_kernel<T, N>, grid, dim3(kWarp, kRowThreads), 0, stream, d_y.data<T>(),
                d_y.dim(0), d_y.dim(1), d_y.stride(0), partial);
}

}  // namespace

void bias_add(Device& device, const Tensor& bias, const Tensor& y) {
  if (y.numel() == 0) return;
  const Tensor on_every_row(bias.raw(), bias.dtype(), y.shape(), Shape{0, 1});
  with_compute_type(y.dtype(), [&](auto element) {
    using Y = decltype(element);
    constexpr int N = kVectorElements<Y>;
    for_each_vector<N>(compute_stream(device), rows_of(N, {on_every_row, y}), AddBias<Y>{AnyFloats(bias), y.data<Y>()});
  });
}

void bias_backward(Device& device, const Tensor& d_y, const Tensor& d_bias) {
  if (d_y.numel() == 0) return;
  const cudaStream_t stream = compute_stream(device);
  float* const partial = static_cast<float*>(device.scratch());
  const int64_t parts = bias_backward_parts(d_y.dim(0));
  with_compute_type(d_y.dtype(), [&](auto element) {
    using T = decltype(element);
    constexpr int N = kVectorElements<T>;
    if (holds_vectors(d_y, N))
      launch_column_sums<T, N>(stream, d_y, parts, partial);
    else
      launch_column_sums<T, 1>(stream, d_y, parts, partial);
  });
  add_partial_rows(stream, partial, parts, d_y.dim(1), d_bias.data<float>());
}

}  // namespace farspan::cuda
