// SPDX-License-Identifier: Apache-2.0
// RMSNorm on rows that are read once: the threads of a row hold it in registers between the sum and the result. A short
// row belongs to some lanes of a warp, a long one to a block. What fits neither (odd sizes and addresses, very long
// rows) is read a second time instead.
#include "base/math.h"
#include "ops/cuda/amax.cuh"
#include "ops/cuda/early_launch.cuh"
#include "ops/cuda/ops.h"
#include "ops/cuda/rms_norm.cuh"
#include "ops/operand_checks.h"

namespace farspan::cuda {
namespace {

// Sums each of values[C] over the threads of a row. `shared`: C floats per warp of the block, not in use.
template <int C>
__device__ __forceinline__ void sum_row(float (&values)[C], int lanes, float* shared) {
  if (lanes > kWarp) return sum_block(values, shared);
#pragma unroll
  for (int c = 0; c < C; ++c) values[c] = sum_lanes(values[c], lanes);
}

constexpr int kForwardThreads = 512;  // at most, of a block

// kLanes: norm.lanes where that is known at compile time, else 0. The weight is of type T.
template <typename T, int N, int V, int kLanes>
__global__ void __launch_bounds__(kForwardThreads)
    forward_kernel(const Norm norm, const NormRows<T> x, const NormRows<T> y) {
  let_next_start();
  await_previous();
  __shared__ float shared[2][kForwardThreads / kWarp];
  const int lanes = kLanes > 0 ? kLanes : norm.lanes;
  const Columns<N> columns{lanes, static_cast<int>(threadIdx.x) % lanes, static_cast<int>(norm.columns)};
  const int64_t rows_per_block = static_cast<int>(blockDim.x) / lanes;
  LargestMagnitude<T> largest[1];
  int turn = 0;
  for (int64_t first = blockIdx.x * rows_per_block; first < norm.rows; first += gridDim.x * rows_per_block) {
    const int64_t row = first + static_cast<int>(threadIdx.x) / lanes;
    const bool active = row < norm.rows;
    const RowIndex index = row_index(active ? row : 0, norm.heads);
    const T* from = x.at(index);
    Vector<T, N> held[V], weight[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      held[v].clear();
      if (active && columns.inside(v)) held[v].load_once(from + columns.first(v));
    }
    load_weight(weight, norm, columns);
    float squares[1] = {0};
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float values[N];
      held[v].get(values);
#pragma unroll
      for (int i = 0; i < N; ++i) squares[0] += values[i] * values[i];
    }
    sum_row(squares, lanes, shared[turn]);
    turn ^= 1;
    const float rstd = rsqrtf(squares[0] * norm.per_column + norm.epsilon);
    if (!active) continue;
    if (columns.lane == 0) norm.rstd[row] = rstd;
    T* to = y.at(index);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (!columns.inside(v)) continue;
      float values[N], factor[N];
      held[v].get(values);
      weight[v].get(factor);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = values[i] * rstd * factor[i];
      held[v].set(values);
      held[v].store(to + columns.first(v));
      largest[0].add(held[v]);
    }
  }
  raise_amax(largest, {norm.amax});
}

// Rows of any length and alignment, one to a block.
template <typename T>
__global__ void __launch_bounds__(kForwardThreads)
    reread_kernel(const Norm norm, const NormRows<T> x, const NormRows<T> y) {
  let_next_start();
  await_previous();
  __shared__ float shared[kForwardThreads / kWarp];
  LargestMagnitude<T> largest[1];
  for (int64_t row = blockIdx.x; row < norm.rows; row += gridDim.x) {
    const RowIndex index = row_index(row, norm.heads);
    const T* from = x.at(index);
    float squares[1] = {0};
    for (int64_t i = threadIdx.x; i < norm.columns; i += blockDim.x) {
      const float value = as_float(from[i]);
      squares[0] += value * value;
    }
    __syncthreads();  // the row before has read its sum
    sum_block(squares, shared);
    const float rstd = rsqrtf(squares[0] * norm.per_column + norm.epsilon);
    if (threadIdx.x == 0) norm.rstd[row] = rstd;
    T* to = y.at(index);
    for (int64_t i = threadIdx.x; i < norm.columns; i += blockDim.x) {
      float weight[1];
      norm.weight.get(i, weight);
      const float value[1] = {as_float(from[i]) * rstd * weight[0]};
      Vector<T, 1> result;
      result.set(value);
      result.store(to + i);
      largest[0].add(result);
    }
  }
  raise_amax(largest, {norm.amax});
}
template <typename T, int N, int V, int kLanes>
void launch_forward(cudaStream_t stream, Norm norm, int lanes, const Tensor& x, const Tensor& y) {
  norm.lanes = lanes;
  const int threads = lanes > kWarp ? lanes : 128;
  const unsigned int blocks = grid_size(ceil_div(norm.rows, threads / lanes));
  launch_kernel(Start::early, forward_kernel<T, N, V, kLanes>, blocks, threads, 0, stream, norm, NormRows<T>(x),
                NormRows<T>(y));
}

// Few lanes with many vectors each: fewer steps to the sum, and more loads under way in a thread.
template <typename T>
void forward(cudaStream_t stream, const Norm& norm, const Tensor& x, const Tensor& weight, const Tensor& y) {
  constexpr int N = kVectorElements<T>;
  const int64_t vectors = norm.columns / N;
  if (!holds_vectors(x, N) || !holds_vectors(y, N) || !holds_vectors(weight, N) || weight.dtype() != x.dtype() ||
      vectors > 8 * kForwardThreads) {
    const int threads = norm.columns <= 1024 ? 128 : kForwardThreads;
    launch_kernel(Start::early, reread_kernel<T>, grid_size(norm.rows), threads, 0, stream, norm, NormRows<T>(x),
                  NormRows<T>(y));
    return;
  }
  if (vectors <= 8) return launch_forward<T, N, 2, 4>(stream, norm, 4, x, y);
  if (vectors <= 16) return launch_forward<T, N, 4, 4>(stream, norm, 4, x, y);
  if (vectors <= 32) return launch_forward<T, N, 4, 8>(stream, norm, 8, x, y);
  const int lanes = lanes_for(vectors, 8, 8);
  const int64_t each = ceil_div(vectors, lanes);
  if (each <= 5) return launch_forward<T, N, 5, 0>(stream, norm, lanes, x, y);
  if (each <= 6) return launch_forward<T, N, 6, 0>(stream, norm, lanes, x, y);
  launch_forward<T, N, 8, 0>(stream, norm, lanes, x, y);
}

}  // namespace

void rms_norm_forward(Device& device, const Tensor& x, const Tensor& weight, double epsilon, const Tensor& y,
                      const Tensor& rstd, const Tensor& amax) {
  clear_amax(compute_stream(device), amax);
  if (row_count(x) == 0) return;
  Norm norm(x, weight, rstd);
  norm.amax = address_of(amax);
  norm.epsilon = static_cast<float>(epsilon);
  with_compute_type(x.dtype(),
                    [&](auto element) { forward<decltype(element)>(compute_stream(device), norm, x, weight, y); });
}

}  // namespace farspan::cuda
