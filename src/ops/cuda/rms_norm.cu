// SPDX-License-Identifier: Apache-2.0
// RMSNorm on rows that are read once: the threads of a row hold it in registers between the sum and the result. A short
// row belongs to some lanes of a warp, a long one to a block. What fits neither (odd sizes and addresses, very long
// rows) is read a second time instead.
//
// Backward: each of a fixed number of blocks walks over its rows, keeps its share of the weight gradient in registers
// and leaves it as one row of partial sums.
#include "base/math.h"
#include "ops/cuda/amax.cuh"
#include "ops/cuda/early_launch.cuh"
#include "ops/cuda/norm_rows.cuh"
#include "ops/cuda/ops.h"
#include "ops/cuda/partial_rows.h"
#include "ops/cuda/scratch.h"
#include "ops/operand_checks.h"

namespace farspan::cuda {
namespace {

struct Norm {
  int64_t rows, heads, columns;
  int lanes;  // threads of a row: a power of two up to a warp, or a block of whole warps
  AnyFloats weight;
  float per_column;  // 1 / columns
  float epsilon;
  float* rstd;
  float* amax;  // forward; null: not wanted
  bool accumulate;

  Norm(const Tensor& x, const Tensor& weight_tensor, const Tensor& rstd_tensor)
      : rows(row_count(x)),
        heads(heads_of(x)),
        columns(x.dim(-1)),
        lanes(0),
        weight(weight_tensor),
        per_column(1.0f / static_cast<float>(columns)),
        epsilon(0),
        rstd(rstd_tensor.data<float>()),
        amax(nullptr),
        accumulate(false) {}
};

// Sums each of values[C] over the threads of a row. `shared`: C floats per warp of the block, not in use.
template <int C>
__device__ __forceinline__ void sum_row(float (&values)[C], int lanes, float* shared) {
  if (lanes > kWarp) return sum_block(values, shared);
#pragma unroll
  for (int c = 0; c < C; ++c) values[c] = sum_lanes(values[c], lanes);
}

// The columns of one thread: V vectors of N, `lanes` vectors apart. Outside the row: none.
template <int N>
struct Columns {
  int lanes, lane, end;
  __device__ __forceinline__ int first(int v) const { return (v * lanes + lane) * N; }
  __device__ __forceinline__ bool inside(int v) const { return first(v) < end; }
};

template <int V, typename T, int N>
__device__ __forceinline__ void load_weight(Vector<T, N> (&weight)[V], const Norm& norm, const Columns<N>& columns) {
#pragma unroll
  for (int v = 0; v < V; ++v) {
    weight[v].clear();
    if (columns.inside(v)) weight[v].load(static_cast<const T*>(norm.weight.data) + columns.first(v));
  }
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
    forward_reread_kernel(const Norm norm, const NormRows<T> x, const NormRows<T> y) {
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

constexpr int kBackwardThreads = 512;  // at most, of a block

template <typename T>
struct BackwardRows {
  NormRows<T> d_y, x, d_x;
};

// What a thread holds of R rows that follow each other.
template <typename T, int N, int R, int V, bool kAccumulate>
struct HeldRows {
  Vector<T, N> d_y[R][V], x[R][V], before[kAccumulate ? R : 1][V];
  float rstd[R];

  __device__ __forceinline__ void load(const Norm& norm, const BackwardRows<T>& rows, const Columns<N>& columns,
                                       int64_t first_row, RowIndex index) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const bool active = first_row + r < norm.rows;
      rstd[r] = active ? norm.rstd[first_row + r] : 0.0f;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        d_y[r][v].clear();
        x[r][v].clear();
        if (!active || !columns.inside(v)) continue;
        d_y[r][v].load_once(rows.d_y.at(index) + columns.first(v));
        x[r][v].load_once(rows.x.at(index) + columns.first(v));
        if constexpr (kAccumulate) before[r][v].load_once(rows.d_x.at(index) + columns.first(v));
      }
      index = advanced(index, row_index(1, norm.heads), norm.heads);
    }
  }

  // Adds the rows' shares to dot, <g, xhat> of each row, and to the weight gradient.
  __device__ __forceinline__ void reduce(const Vector<T, N> (&weight)[V], float (&dot)[R],
                                         float (&d_weight)[V][N]) const {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float factor[N];
      weight[v].get(factor);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        float d[N], values[N];
        d_y[r][v].get(d);
        x[r][v].get(values);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float d_xhat = d[i] * (values[i] * rstd[r]);
          dot[r] += d_xhat * factor[i];
          d_weight[v][i] += d_xhat;
        }
      }
    }
  }

  __device__ __forceinline__ void store(const Norm& norm, const BackwardRows<T>& rows, const Columns<N>& columns,
                                        const Vector<T, N> (&weight)[V], const float (&dot)[R], int64_t first_row,
                                        RowIndex index) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (first_row + r >= norm.rows) continue;
      const float share = rstd[r] * rstd[r] * dot[r] * norm.per_column;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (!columns.inside(v)) continue;
        float d[N], values[N], factor[N], sum[N] = {};
        weight[v].get(factor);
        d_y[r][v].get(d);
        x[r][v].get(values);
        if constexpr (kAccumulate) before[r][v].get(sum);
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] += rstd[r] * (d[i] * factor[i]) - values[i] * share;
        Vector<T, N> result;
        result.set(sum);
        result.store(rows.d_x.at(index) + columns.first(v));
      }
      index = advanced(index, row_index(1, norm.heads), norm.heads);
    }
  }
};

// kPrefetch: the next rows are under way while these are worked on, for blocks that wait for each other in every row.
// The weight is of type T.
template <typename T, int N, int R, int V, bool kAccumulate, bool kPrefetch>
__global__ void __launch_bounds__(kBackwardThreads)
    backward_kernel(const Norm norm, const BackwardRows<T> rows, float* partial) {
  let_next_start();
  await_previous();
  __shared__ float shared[2][kBackwardThreads / kWarp * R];
  extern __shared__ float weight_sums[];  // rows of a block, columns
  const Columns<N> columns{norm.lanes, static_cast<int>(threadIdx.x) % norm.lanes, static_cast<int>(norm.columns)};
  const int group = static_cast<int>(threadIdx.x) / norm.lanes;
  const int groups = static_cast<int>(blockDim.x) / norm.lanes;
  const int64_t rows_per_block = int64_t{groups} * R;
  const int64_t step = gridDim.x * rows_per_block;
  const RowIndex step_index = row_index(step, norm.heads);

  Vector<T, N> weight[V];
  load_weight(weight, norm, columns);
  float d_weight[V][N] = {};
  int64_t first = blockIdx.x * rows_per_block;  // of the block; the group's rows begin `own` further
  const int64_t own = int64_t{group} * R;
  RowIndex index = row_index(first + own, norm.heads);
  HeldRows<T, N, R, V, kAccumulate> held, next;
  if (first < norm.rows) held.load(norm, rows, columns, first + own, index);
  for (int turn = 0; first < norm.rows; turn ^= 1) {
    const RowIndex next_index = advanced(index, step_index, norm.heads);
    const bool more = first + step < norm.rows;
    if (kPrefetch && more) next.load(norm, rows, columns, first + step + own, next_index);
    float dot[R] = {};
    held.reduce(weight, dot, d_weight);
    sum_row(dot, norm.lanes, shared[turn]);
    held.store(norm, rows, columns, weight, dot, first + own, index);
    if (kPrefetch)
      held = next;
    else if (more)
      held.load(norm, rows, columns, first + step + own, next_index);
    first += step;
    index = next_index;
  }
  int64_t first_columns[V];
#pragma unroll
  for (int v = 0; v < V; ++v) first_columns[v] = columns.first(v);
  leave_partial_row(d_weight, first_columns, norm.columns, group, groups, weight_sums,
                    partial + blockIdx.x * norm.columns);
}

// Rows of any length and alignment, one to a block at a time; the weight gradient grows in the partial row itself.
template <typename T>
__global__ void __launch_bounds__(kBackwardThreads)
    backward_reread_kernel(const Norm norm, const BackwardRows<T> rows, float* partial) {
  let_next_start();
  await_previous();
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
      const float d_xhat = as_float(rows.d_y.at(index)[i]) * (as_float(rows.x.at(index)[i]) * rstd);
      dot[0] += d_xhat * weight[0];
      sums[i] += d_xhat;
    }
    __syncthreads();  // the row before has read its sum
    sum_block(dot, shared);
    const float mean = dot[0] * norm.per_column;
    for (int64_t i = threadIdx.x; i < norm.columns; i += blockDim.x) {
      float weight[1];
      norm.weight.get(i, weight);
      const float before = norm.accumulate ? as_float(rows.d_x.at(index)[i]) : 0.0f;
      const float xhat = as_float(rows.x.at(index)[i]) * rstd;
      const float value[1] = {before + rstd * (as_float(rows.d_y.at(index)[i]) * weight[0] - xhat * mean)};
      Vector<T, 1> result;
      result.set(value);
      result.store(rows.d_x.at(index) + i);
    }
  }
}

// lanes, starting at `least` and doubled, until `vectors` fit at `each` per lane.
int lanes_for(int64_t vectors, int each, int least) {
  int lanes = least;
  while (int64_t{lanes} * each < vectors) lanes *= 2;
  return lanes;
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
    launch_kernel(Start::early, forward_reread_kernel<T>, grid_size(norm.rows), threads, 0, stream, norm, NormRows<T>(x),
                  NormRows<T>(y));
    return;
  }
  if (vectors <= 8) return launch_forward<T, N, 2, 4>(stream, norm, 4, x, y);
  if (vectors <= 16) return launch_forward<T, N, 4, 4>(stream, norm, 4, x, y);
  if (vectors <= 32) return launch_forward<T, N, 4, 8>(stream, norm, 8, x, y);
  launch_forward<T, N, 8, 0>(stream, norm, lanes_for(vectors, 8, 8), x, y);
}

struct BackwardOperands {
  const Tensor& d_y;
  const Tensor& x;
  const Tensor& d_x;
  float* partial;

  template <typename T>
  BackwardRows<T> rows() const {
    return {NormRows<T>(d_y), NormRows<T>(x), NormRows<T>(d_x)};
  }
};

template <typename T, int N, int R, int V, bool kPrefetch>
int64_t launch_backward(cudaStream_t stream, Norm norm, int lanes, const BackwardOperands& operands) {
  norm.lanes = lanes;
  const int threads = lanes > kWarp ? lanes : 256;
  const int groups = threads / lanes;
  // Two blocks of up to 256 threads fit on a multiprocessor, or one larger.
  const int64_t most = ceil_div(rms_norm_backward_parts(norm.rows), threads > 256 ? 2 : 1);
  const int64_t blocks = std::min<int64_t>(most, ceil_div(norm.rows, groups * R));
  const size_t shared = groups == 1 ? 0 : static_cast<size_t>(groups * norm.columns) * sizeof(float);
  const auto kernel =
      norm.accumulate ? backward_kernel<T, N, R, V, true, kPrefetch> : backward_kernel<T, N, R, V, false, kPrefetch>;
  launch_kernel(Start::early, kernel, grid_size(blocks), threads, shared, stream, norm, operands.rows<T>(),
                operands.partial);
  return blocks;
}

// Returns the number of partial rows.
template <typename T>
int64_t backward(cudaStream_t stream, const Norm& norm, const Tensor& weight, const BackwardOperands& operands) {
  constexpr int N = kVectorElements<T>;
  const int64_t vectors = norm.columns / N;
  if (!holds_vectors(operands.d_y, N) || !holds_vectors(operands.x, N) || !holds_vectors(operands.d_x, N) ||
      !holds_vectors(weight, N) || weight.dtype() != operands.x.dtype() || vectors > 4 * kBackwardThreads) {
    const int64_t blocks = rms_norm_backward_parts(norm.rows);
    const int threads = norm.columns <= 1024 ? 128 : kBackwardThreads;
    launch_kernel(Start::early, backward_reread_kernel<T>, grid_size(blocks), threads, 0, stream, norm,
                  operands.rows<T>(), operands.partial);
    return blocks;
  }
  const auto warps = [vectors](int each) { return static_cast<int>(round_up(ceil_div(vectors, each), kWarp)); };
  if (vectors <= 2 * kWarp) return launch_backward<T, N, 2, 2, false>(stream, norm, lanes_for(vectors, 2, 4), operands);
  if (vectors <= 4 * kWarp) return launch_backward<T, N, 1, 4, false>(stream, norm, kWarp, operands);
  if (vectors <= kBackwardThreads) return launch_backward<T, N, 2, 1, true>(stream, norm, warps(1), operands);
  if (vectors <= 2 * kBackwardThreads) return launch_backward<T, N, 1, 2, true>(stream, norm, warps(2), operands);
  return launch_backward<T, N, 1, 4, false>(stream, norm, warps(4), operands);
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
