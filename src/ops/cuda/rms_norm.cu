// SPDX-License-Identifier: Apache-2.0
// RMSNorm on rows that are read once: the threads of a row hold it in registers between the sum and the result. A short
// row belongs to some lanes of a warp, a long one to a block. What fits neither (odd sizes and addresses, very long
// rows) is read a second time instead.
//
// Backward: each of a fixed number of blocks walks over its rows, keeps its share of the weight gradient in registers
// and leaves it as one row of partial sums.
#include "base/math.h"
#include "ops/cuda/norm_rows.cuh"
#include "ops/cuda/ops.h"
#include "ops/cuda/partial_rows.h"
#include "ops/cuda/scratch.h"
#include "ops/operand_checks.h"

namespace farspan::cuda {
namespace {

// The threads of one row: a power of two up to a warp, or a block of whole warps.
struct RowThreads {
  int lanes;    // of one row
  int threads;  // of a block
  int vectors;  // held by a thread
};

struct Norm {
  int64_t rows, heads, columns;
  int lanes;
  AnyFloats weight;
  float epsilon;
  float* rstd;
  bool accumulate;

  Norm(const Tensor& x, const Tensor& weight_tensor, const Tensor& rstd_tensor)
      : rows(row_count(x)),
        heads(heads_of(x)),
        columns(x.dim(-1)),
        lanes(0),
        weight(weight_tensor),
        epsilon(0),
        rstd(rstd_tensor.data<float>()),
        accumulate(false) {}
};

// Sums each of values[C] over the threads of a row. `shared`: C floats per warp of the block, not in use.
template <int C>
__device__ __forceinline__ void sum_row(float (&values)[C], int lanes, float* shared) {
  if (lanes > kWarp) return sum_block(values, shared);
#pragma unroll
  for (int c = 0; c < C; ++c) values[c] = sum_lanes(values[c], lanes);
}

constexpr int kForwardThreads = 512;  // at most, of a block

template <typename T, int N, int V>
__global__ void __launch_bounds__(kForwardThreads)
    forward_kernel(const Norm norm, const NormRows<T> x, const NormRows<T> y) {
  __shared__ float shared[2][kForwardThreads / kWarp];
  const int lane = static_cast<int>(threadIdx.x) % norm.lanes;
  const int64_t rows_per_block = static_cast<int>(blockDim.x) / norm.lanes;
  int turn = 0;
  for (int64_t first = blockIdx.x * rows_per_block; first < norm.rows; first += gridDim.x * rows_per_block) {
    const int64_t row = first + static_cast<int>(threadIdx.x) / norm.lanes;
    const bool active = row < norm.rows;
    const RowIndex index = row_index(active ? row : 0, norm.heads);
    const T* from = x.at(index);
    Vector<T, N> held[V];
    float squares[1] = {0};
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int64_t column = int64_t{v * norm.lanes + lane} * N;
      if (active && column < norm.columns)
        held[v].load(from + column);
      else
        held[v].clear();
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float values[N];
      held[v].get(values);
#pragma unroll
      for (int i = 0; i < N; ++i) squares[0] += values[i] * values[i];
    }
    sum_row(squares, norm.lanes, shared[turn]);
    turn ^= 1;
    const float rstd = rsqrtf(squares[0] / static_cast<float>(norm.columns) + norm.epsilon);
    if (!active) continue;
    if (lane == 0) norm.rstd[row] = rstd;
    T* to = y.at(index);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int64_t column = int64_t{v * norm.lanes + lane} * N;
      if (column >= norm.columns) continue;
      float values[N], weight[N];
      held[v].get(values);
      norm.weight.get(column, weight);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = values[i] * rstd * weight[i];
      held[v].set(values);
      held[v].store(to + column);
    }
  }
}

// Rows of any length and alignment, one to a block.
template <typename T>
__global__ void __launch_bounds__(kForwardThreads)
    forward_reread_kernel(const Norm norm, const NormRows<T> x, const NormRows<T> y) {
  __shared__ float shared[kForwardThreads / kWarp];
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
    const float rstd = rsqrtf(squares[0] / static_cast<float>(norm.columns) + norm.epsilon);
    if (threadIdx.x == 0) norm.rstd[row] = rstd;
    T* to = y.at(index);
    for (int64_t i = threadIdx.x; i < norm.columns; i += blockDim.x) {
      float weight[1];
      norm.weight.get(i, weight);
      const float value[1] = {as_float(from[i]) * rstd * weight[0]};
      Vector<T, 1> result;
      result.set(value);
      result.store(to + i);
    }
  }
}

constexpr int kBackwardThreads = 512;  // at most, of a block

// R rows at a time, of at most V vectors per thread.
template <typename T, int N, int R, int V>
__global__ void __launch_bounds__(kBackwardThreads)
    backward_kernel(const Norm norm, const NormRows<T> d_y, const NormRows<T> x, const NormRows<T> d_x,
                    float* partial) {
  __shared__ float shared[2][kBackwardThreads / kWarp * R];
  extern __shared__ float weight_sums[];  // rows of a block, columns
  const int lane = static_cast<int>(threadIdx.x) % norm.lanes;
  const int group = static_cast<int>(threadIdx.x) / norm.lanes;
  const int groups = static_cast<int>(blockDim.x) / norm.lanes;
  const int64_t rows_per_block = int64_t{groups} * R;
  float d_weight[V][N] = {};
  int turn = 0;
  for (int64_t first = blockIdx.x * rows_per_block; first < norm.rows; first += gridDim.x * rows_per_block) {
    const int64_t first_row = first + int64_t{group} * R;
    Vector<T, N> of_d_y[R][V], of_x[R][V], of_d_x[R][V];
    float rstd[R], dot[R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const bool active = first_row + r < norm.rows;
      const RowIndex index = row_index(active ? first_row + r : 0, norm.heads);
      rstd[r] = active ? norm.rstd[first_row + r] : 0.0f;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int64_t column = int64_t{v * norm.lanes + lane} * N;
        of_d_y[r][v].clear();
        of_x[r][v].clear();
        of_d_x[r][v].clear();
        if (!active || column >= norm.columns) continue;
        of_d_y[r][v].load(d_y.at(index) + column);
        of_x[r][v].load(x.at(index) + column);
        if (norm.accumulate) of_d_x[r][v].load(d_x.at(index) + column);
      }
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int64_t column = int64_t{v * norm.lanes + lane} * N;
      if (column >= norm.columns) continue;
      float weight[N];
      norm.weight.get(column, weight);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        float d[N], xhat[N];
        of_d_y[r][v].get(d);
        of_x[r][v].get(xhat);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float d_xhat = d[i] * (xhat[i] * rstd[r]);
          dot[r] += d_xhat * weight[i];
          d_weight[v][i] += d_xhat;
        }
      }
    }
    sum_row(dot, norm.lanes, shared[turn]);
    turn ^= 1;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int64_t column = int64_t{v * norm.lanes + lane} * N;
      if (column >= norm.columns) continue;
      float weight[N];
      norm.weight.get(column, weight);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (first_row + r >= norm.rows) continue;
        const float mean = dot[r] / static_cast<float>(norm.columns);
        float d[N], xhat[N], sum[N];
        of_d_y[r][v].get(d);
        of_x[r][v].get(xhat);
        of_d_x[r][v].get(sum);
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] += rstd[r] * (d[i] * weight[i] - xhat[i] * rstd[r] * mean);
        of_d_x[r][v].set(sum);
        of_d_x[r][v].store(d_x.at(row_index(first_row + r, norm.heads)) + column);
      }
    }
  }
  int64_t first_columns[V];
#pragma unroll
  for (int v = 0; v < V; ++v) first_columns[v] = int64_t{v * norm.lanes + lane} * N;
  leave_partial_row(d_weight, first_columns, norm.columns, group, groups, weight_sums,
                    partial + blockIdx.x * norm.columns);
}

// Rows of any length and alignment, one to a block at a time; the weight gradient grows in the partial row itself.
template <typename T>
__global__ void __launch_bounds__(kBackwardThreads)
    backward_reread_kernel(const Norm norm, const NormRows<T> d_y, const NormRows<T> x, const NormRows<T> d_x,
                           float* partial) {
  __shared__ float shared[kBackwardThreads / kWarp];
  float* const sums = partial + blockIdx.x * norm.columns;
  for (int64_t i = threadIdx.x; i < norm.columns; i += blockDim.x) sums[i] = 0;
  for (int64_t row = blockIdx.x; row < norm.rows; row += gridDim.x) {
    const RowIndex index = row_index(row, norm.heads);
    const float rstd = norm.rstd[row];
    float dot[1] = {0};
    for (int64_t i = threadIdx.x; i < norm.columns; i += blockDim.x) {
      float weight[1];
      norm.weight.get(i, weight);
      const float d_xhat = as_float(d_y.at(index)[i]) * (as_float(x.at(index)[i]) * rstd);
      dot[0] += d_xhat * weight[0];
      sums[i] += d_xhat;
    }
    __syncthreads();  // the row before has read its sum
    sum_block(dot, shared);
    const float mean = dot[0] / static_cast<float>(norm.columns);
    for (int64_t i = threadIdx.x; i < norm.columns; i += blockDim.x) {
      float weight[1];
      norm.weight.get(i, weight);
      const float before = norm.accumulate ? as_float(d_x.at(index)[i]) : 0.0f;
      const float xhat = as_float(x.at(index)[i]) * rstd;
      const float value[1] = {before + rstd * (as_float(d_y.at(index)[i]) * weight[0] - xhat * mean)};
      Vector<T, 1> result;
      result.set(value);
      result.store(d_x.at(index) + i);
    }
  }
}

int lanes_for(int64_t vectors) {
  int lanes = 8;
  while (lanes < vectors) lanes *= 2;
  return lanes;
}

// Few lanes with many vectors each: fewer steps to the sum, and more loads under way in a thread.
RowThreads forward_threads(int64_t vectors) {
  constexpr int kMostVectors = 8;
  const int lanes = lanes_for(ceil_div(vectors, kMostVectors));
  int held = 1;
  while (held * lanes < vectors) held *= 2;
  return {.lanes = lanes, .threads = lanes > kWarp ? lanes : 128, .vectors = held};
}

// A warp or less for rows of up to 4 vectors per lane, else as small a block as holds them.
RowThreads backward_threads(int64_t vectors) {
  if (vectors <= kWarp) return {.lanes = lanes_for(vectors), .threads = 256, .vectors = 1};
  if (vectors <= 4 * kWarp) return {.lanes = kWarp, .threads = 256, .vectors = vectors <= 2 * kWarp ? 2 : 4};
  const int held = vectors <= 256 ? 1 : vectors <= 1024 ? 2 : 4;
  const int threads = static_cast<int>(round_up(ceil_div(vectors, held), kWarp));
  return {.lanes = threads, .threads = threads, .vectors = held};
}

template <typename T, int N, int V>
void launch_forward(cudaStream_t stream, Norm norm, const RowThreads& row, const Tensor& x, const Tensor& y) {
  norm.lanes = row.lanes;
  const unsigned int blocks = grid_size(ceil_div(norm.rows, row.threads / row.lanes));
  forward_kernel<T, N, V><<<blocks, row.threads, 0, stream>>>(norm, NormRows<T>(x), NormRows<T>(y));
  FARSPAN_CUDA_LAUNCHED();
}

template <typename T>
void forward(cudaStream_t stream, const Norm& norm, const Tensor& x, const Tensor& weight, const Tensor& y) {
  constexpr int N = kVectorElements<T>;
  const RowThreads row = forward_threads(norm.columns / N);
  if (!holds_vectors(x, N) || !holds_vectors(y, N) || !holds_vectors(weight, N) || row.threads > kForwardThreads) {
    const int threads = norm.columns <= 1024 ? 128 : kForwardThreads;
    forward_reread_kernel<T><<<grid_size(norm.rows), threads, 0, stream>>>(norm, NormRows<T>(x), NormRows<T>(y));
    FARSPAN_CUDA_LAUNCHED();
    return;
  }
  switch (row.vectors) {
    case 1:
      return launch_forward<T, N, 1>(stream, norm, row, x, y);
    case 2:
      return launch_forward<T, N, 2>(stream, norm, row, x, y);
    case 4:
      return launch_forward<T, N, 4>(stream, norm, row, x, y);
    default:
      return launch_forward<T, N, 8>(stream, norm, row, x, y);
  }
}

struct BackwardOperands {
  const Tensor& d_y;
  const Tensor& x;
  const Tensor& d_x;
  float* partial;
};

template <typename T, int N, int R, int V>
int64_t launch_backward(cudaStream_t stream, Norm norm, const RowThreads& row, const BackwardOperands& operands) {
  norm.lanes = row.lanes;
  const int groups = row.threads / row.lanes;
  const int64_t blocks = std::min<int64_t>(rms_norm_backward_parts(norm.rows), ceil_div(norm.rows, groups * R));
  const int64_t shared = groups == 1 ? 0 : groups * norm.columns * int64_t{sizeof(float)};
  backward_kernel<T, N, R, V><<<grid_size(blocks), row.threads, static_cast<size_t>(shared), stream>>>(
      norm, NormRows<T>(operands.d_y), NormRows<T>(operands.x), NormRows<T>(operands.d_x), operands.partial);
  FARSPAN_CUDA_LAUNCHED();
  return blocks;
}

// Returns the number of partial rows.
template <typename T>
int64_t backward(cudaStream_t stream, const Norm& norm, const Tensor& weight, const BackwardOperands& operands) {
  constexpr int N = kVectorElements<T>;
  const RowThreads row = backward_threads(norm.columns / N);
  const bool vectors = holds_vectors(operands.d_y, N) && holds_vectors(operands.x, N) &&
                       holds_vectors(operands.d_x, N) && holds_vectors(weight, N);
  if (!vectors || row.threads > kBackwardThreads) {
    const int64_t blocks = rms_norm_backward_parts(norm.rows);
    const int threads = norm.columns <= 1024 ? 128 : kBackwardThreads;
    backward_reread_kernel<T><<<grid_size(blocks), threads, 0, stream>>>(
        norm, NormRows<T>(operands.d_y), NormRows<T>(operands.x), NormRows<T>(operands.d_x), operands.partial);
    FARSPAN_CUDA_LAUNCHED();
    return blocks;
  }
  switch (row.vectors) {
    case 1:
      return launch_backward<T, N, 4, 1>(stream, norm, row, operands);
    case 2:
      return launch_backward<T, N, 2, 2>(stream, norm, row, operands);
    default:
      return launch_backward<T, N, 1, 4>(stream, norm, row, operands);
  }
}

}  // namespace

void rms_norm_forward(Device& device, const Tensor& x, const Tensor& weight, double epsilon, const Tensor& y,
                      const Tensor& rstd) {
  if (row_count(x) == 0) return;
  Norm norm(x, weight, rstd);
  norm.epsilon = static_cast<float>(epsilon);
  with_compute_type(x.dtype(),
                    [&](auto element) { forward<decltype(element)>(compute_stream(device), norm, x, weight, y); });
}

void rms_norm_backward(Device& device, const Tensor& d_y, const Tensor& x, const Tensor& weight, const Tensor& rstd,
                       const Tensor& d_x, Accumulate accumulate_d_x, const Tensor& d_weight) {
  if (row_count(x) == 0) return;
  const cudaStream_t stream = compute_stream(device);
  Norm norm(x, weight, rstd);
  norm.accumulate = accumulate_d_x == Accumulate::yes;
  const BackwardOperands operands{d_y, x, d_x, static_cast<float*>(device.scratch())};
  with_compute_type(x.dtype(), [&](auto element) {
    const int64_t parts = backward<decltype(element)>(stream, norm, weight, operands);
    add_partial_rows(stream, operands.partial, parts, norm.columns, d_weight.data<float>());
  });
}

}  // namespace farspan::cuda
