// SPDX-License-Identifier: Apache-2.0
// RMSNorm's gradients: each of a fixed number of blocks walks over its rows, keeps its share of the weight gradient in
// registers and leaves it as one row of partial sums. A short row belongs to some lanes of a warp, a long one to a block.
// What fits neither (odd sizes and addresses, very long rows) is read a second time instead.
#include <algorithm>

#include "base/math.h"
#include "ops/cuda/early_launch.cuh"
#include "ops/cuda/ops.h"
#include "ops/cuda/partial_rows.h"
#include "ops/cuda/rms_norm.cuh"
#include "ops/cuda/scratch.h"
#include "ops/cuda/tensor_core.cuh"
#include "ops/operand_checks.h"

namespace farspan::cuda {
namespace {

constexpr int kBackwardThreads = 512;  // at most, of a block

template <typename T>
struct BackwardRows {
  NormRows<T> d_y, x, d_x;
};

// Of one vector, its share of <g, x> and of the weight gradient, added.
template <typename T, int N>
__device__ __forceinline__ void reduce_vector(const Vector<T, N>& d_y, const Vector<T, N>& x, const Vector<T, N>& weight,
                                              float rstd, float& dot, float (&d_weight)[N]) {
  float d[N], values[N], factor[N];
  d_y.get(d);
  x.get(values);
  weight.get(factor);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float product = d[i] * values[i];
    dot += product * factor[i];
    d_weight[i] += product * rstd;
  }
}

// What x_i <g, x> / columns is multiplied by: xhat_i <g, xhat> rstd / columns.
__device__ __forceinline__ float share_of(float dot, float rstd, float per_column) {
  return dot * rstd * per_column * rstd * rstd;
}

// sum += rstd g - share x
template <typename T, int N>
__device__ __forceinline__ Vector<T, N> gradient_vector(const Vector<T, N>& d_y, const Vector<T, N>& x,
                                                        const Vector<T, N>& weight, float rstd, float share,
                                                        float (&sum)[N]) {
  float d[N], values[N], factor[N];
  d_y.get(d);
  x.get(values);
  weight.get(factor);
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] += rstd * (d[i] * factor[i]) - values[i] * share;
  Vector<T, N> result;
  result.set(sum);
  return result;
}

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

  // Adds the rows' shares to dot, <g, x> of each row, and to the weight gradient.
  __device__ __forceinline__ void reduce(const Vector<T, N> (&weight)[V], float (&dot)[R],
                                         float (&d_weight)[V][N]) const {
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int r = 0; r < R; ++r) reduce_vector(d_y[r][v], x[r][v], weight[v], rstd[r], dot[r], d_weight[v]);
  }

  __device__ __forceinline__ void store(const Norm& norm, const BackwardRows<T>& rows, const Columns<N>& columns,
                                        const Vector<T, N> (&weight)[V], const float (&dot)[R], int64_t first_row,
                                        RowIndex index) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (first_row + r >= norm.rows) continue;
      const float share = share_of(dot[r], rstd[r], norm.per_column);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (!columns.inside(v)) continue;
        float sum[N] = {};
        if constexpr (kAccumulate) before[r][v].get(sum);
        gradient_vector(d_y[r][v], x[r][v], weight[v], rstd[r], share, sum)
            .store(rows.d_x.at(index) + columns.first(v));
      }
      index = advanced(index, row_index(1, norm.heads), norm.heads);
    }
  }
};

// The block's row of partial sums. `shared`: as leave_partial_row says.
template <int V, int N>
__device__ __forceinline__ void leave_weight_sums(const float (&d_weight)[V][N], const Columns<N>& columns, int group,
                                                  int groups, float* shared, float* partial) {
  int64_t first_columns[V];
#pragma unroll
  for (int v = 0; v < V; ++v) first_columns[v] = columns.first(v);
  leave_partial_row(d_weight, first_columns, columns.end, group, groups, shared,
                    partial + blockIdx.x * int64_t{columns.end});
}

// Rows of a warp or less.
template <typename T, int N, int R, int V, bool kAccumulate>
__global__ void __launch_bounds__(kBackwardThreads)
    short_rows_kernel(const Norm norm, const BackwardRows<T> rows, float* partial) {
  let_next_start();
  await_previous();
  extern __shared__ __align__(16) float weight_sums[];  // rows of a block, columns
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
  for (; first < norm.rows; first += step) {
    HeldRows<T, N, R, V, kAccumulate> held;
    held.load(norm, rows, columns, first + own, index);
    float dot[R] = {};
    held.reduce(weight, dot, d_weight);
#pragma unroll
    for (int r = 0; r < R; ++r) dot[r] = sum_lanes(dot[r], norm.lanes);
    held.store(norm, rows, columns, weight, dot, first + own, index);
    index = advanced(index, step_index, norm.heads);
  }
  leave_weight_sums(d_weight, columns, group, groups, weight_sums, partial);
}

// Of compute capability 9.0. The order of sums depends on the shape alone, so no device is asked.
constexpr int kSharedOfMultiprocessor = 228 << 10, kSharedOfSystem = 1 << 10;  // the latter of every block

// Rows of a whole block, R at a time, whose threads wait for each other in each: meanwhile what the next kStages - 1 steps
// read is under way to shared memory. A thread copies what it reads itself, so that nobody else need wait for that.
template <typename T, int N, int R, int V, bool kAccumulate, int kMostThreads>
struct Pipeline {
  static_assert(sizeof(Vector<T, N>) == 16);
  static constexpr int kVectors = R * V * (kAccumulate ? 3 : 2);  // of a thread in a stage
  static constexpr int kStageBytes = 16 * kVectors + 4 * R;       // of a thread
  static constexpr int kBlocks = V <= 4 ? 2 : 1;                  // that have room on a multiprocessor
  static constexpr int kMostBytes = kSharedOfMultiprocessor / kBlocks - kSharedOfSystem - 2048;
  static constexpr int kStages = std::min(6, kMostBytes / (kMostThreads * kStageBytes));
  static_assert(kStages >= 2);

  // So much that no more than kBlocks are on a multiprocessor. Else blocks that start beside the end of a kernel crowd
  // where that has ended first, and as none hands rows on, the others are idle in the end.
  static int shared_bytes(int threads) {
    return std::max(threads * kStages * kStageBytes, kSharedOfMultiprocessor / (kBlocks + 1));
  }

  uint4* vectors;  // this thread's first; the others are blockDim.x further each
  float* rstd;

  // All zeros: nothing is copied to vectors outside the row.
  __device__ __forceinline__ explicit Pipeline(uint4* shared)
      : vectors(shared + threadIdx.x),
        rstd(reinterpret_cast<float*>(shared + kStages * kVectors * blockDim.x) + threadIdx.x) {
    for (int i = 0; i < kStages * kVectors; ++i) vectors[i * blockDim.x] = uint4{};
  }

  __device__ __forceinline__ uint4* vector(int stage, int which) const {
    return vectors + (stage * kVectors + which) * blockDim.x;
  }

  // A group of copies, empty where there are no such rows.
  __device__ __forceinline__ void start(int stage, const Norm& norm, const BackwardRows<T>& rows,
                                        const Columns<N>& columns, int64_t first_row) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (first_row + r >= norm.rows) continue;
      const RowIndex index{first_row + r, 0};
      const T* const from[3] = {rows.d_y.at(index), rows.x.at(index), rows.d_x.at(index)};
      copy_4_async(shared_address(rstd + (stage * R + r) * blockDim.x), norm.rstd + first_row + r);
#pragma unroll
      for (int k = 0; k < (kAccumulate ? 3 : 2); ++k)
#pragma unroll
        for (int v = 0; v < V; ++v)
          if (columns.inside(v))
            copy_16_async(shared_address(vector(stage, (k * R + r) * V + v)), from[k] + columns.first(v), true);
    }
    commit_copies();
  }

  // kind: 0 of d_y, 1 of x, 2 of d_x as it was.
  __device__ __forceinline__ Vector<T, N> get(int stage, int kind, int r, int v) const {
    Vector<T, N> vector_of_row;
    vector_of_row.words[0] = *vector(stage, (kind * R + r) * V + v);
    return vector_of_row;
  }
  __device__ __forceinline__ float rstd_of(int stage, int r) const { return rstd[(stage * R + r) * blockDim.x]; }
};

// norm.heads is 1.
template <typename T, int N, int R, int V, bool kAccumulate, int kMostThreads>
__global__ void __launch_bounds__(kMostThreads, Pipeline<T, N, R, V, kAccumulate, kMostThreads>::kBlocks)
    pipelined_kernel(const Norm norm, const BackwardRows<T> rows, float* partial) {
  using Rows = Pipeline<T, N, R, V, kAccumulate, kMostThreads>;
  constexpr int kStages = Rows::kStages;
  let_next_start();
  await_previous();
  __shared__ float sums[2][kMostThreads / kWarp * R];
  extern __shared__ uint4 stages[];
  const Columns<N> columns{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(norm.columns)};
  const Rows pipeline(stages);
  const int64_t step = int64_t{gridDim.x} * R;
  int64_t row = int64_t{blockIdx.x} * R;
#pragma unroll
  for (int s = 0; s + 1 < kStages; ++s) pipeline.start(s, norm, rows, columns, row + s * step);

  Vector<T, N> weight[V];
  load_weight(weight, norm, columns);
  float d_weight[V][N] = {};
  int stage = 0;
  for (int turn = 0; row < norm.rows; row += step, turn ^= 1) {
    // In the place of what was read in the step before.
    pipeline.start(stage == 0 ? kStages - 1 : stage - 1, norm, rows, columns, row + (kStages - 1) * step);
    wait_copies<kStages - 1>();
    float dot[R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r > 0 && row + r >= norm.rows) continue;
#pragma unroll
      for (int v = 0; v < V; ++v)
        reduce_vector(pipeline.get(stage, 0, r, v), pipeline.get(stage, 1, r, v), weight[v], pipeline.rstd_of(stage, r),
                      dot[r], d_weight[v]);
    }
    sum_block(dot, sums[turn]);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r > 0 && row + r >= norm.rows) continue;
      const float rstd = pipeline.rstd_of(stage, r), share = share_of(dot[r], rstd, norm.per_column);
      T* const d_x = rows.d_x.at({row + r, 0});
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (!columns.inside(v)) continue;
        float sum[N] = {};
        if constexpr (kAccumulate) pipeline.get(stage, 2, r, v).get(sum);
        gradient_vector(pipeline.get(stage, 0, r, v), pipeline.get(stage, 1, r, v), weight[v], rstd, share, sum)
            .store(d_x + columns.first(v));
      }
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  leave_weight_sums(d_weight, columns, 0, 1, nullptr, partial);
}

// Rows of any length and alignment, one to a block at a time; the weight gradient grows in the partial row itself.
template <typename T>
__global__ void __launch_bounds__(kBackwardThreads)
    reread_kernel(const Norm norm, const BackwardRows<T> rows, float* partial) {
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

// Each returns the number of partial rows.
template <typename T, int N, int R, int V>
int64_t launch_backward(cudaStream_t stream, Norm norm, int lanes, const BackwardOperands& operands) {
  constexpr int kThreads = 256;
  norm.lanes = lanes;
  const int groups = kThreads / lanes;
  const int64_t blocks = std::min<int64_t>(rms_norm_backward_parts(norm.rows), ceil_div(norm.rows, groups * R));
  const size_t shared = groups == 1 ? 0 : static_cast<size_t>(groups * norm.columns) * sizeof(float);
  const auto kernel = norm.accumulate ? short_rows_kernel<T, N, R, V, true> : short_rows_kernel<T, N, R, V, false>;
  launch_kernel(Start::early, kernel, grid_size(blocks), kThreads, shared, stream, norm, operands.rows<T>(),
                operands.partial);
  return blocks;
}

template <typename T, int N, int R, int V, bool kAccumulate, int kMostThreads>
int64_t launch_pipelined(cudaStream_t stream, const Norm& norm, const BackwardOperands& operands) {
  using Rows = Pipeline<T, N, R, V, kAccumulate, kMostThreads>;
  const auto kernel = pipelined_kernel<T, N, R, V, kAccumulate, kMostThreads>;
  const int threads = static_cast<int>(round_up(ceil_div(norm.columns / N, V), kWarp));
  const int shared = Rows::shared_bytes(threads);
  FARSPAN_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  const int64_t most = ceil_div(rms_norm_backward_parts(norm.rows) * Rows::kBlocks, 2);
  const int64_t blocks = std::min<int64_t>(most, ceil_div(norm.rows, R));
  launch_kernel(Start::early, kernel, grid_size(blocks), threads, static_cast<size_t>(shared), stream, norm,
                operands.rows<T>(), operands.partial);
  return blocks;
}

template <typename T, int N, int R, int V, int kMostThreads>
int64_t launch_pipelined(cudaStream_t stream, const Norm& norm, const BackwardOperands& operands) {
  return norm.accumulate ? launch_pipelined<T, N, R, V, true, kMostThreads>(stream, norm, operands)
                         : launch_pipelined<T, N, R, V, false, kMostThreads>(stream, norm, operands);
}

template <typename T>
int64_t backward(cudaStream_t stream, const Norm& norm, const Tensor& weight, const BackwardOperands& operands) {
  constexpr int N = kVectorElements<T>;
  const int64_t vectors = norm.columns / N;
  constexpr int64_t kMostVectors = 8 * 256;  // of the last case below
  const bool wide = vectors > 4 * kWarp;
  if (!holds_vectors(operands.d_y, N) || !holds_vectors(operands.x, N) || !holds_vectors(operands.d_x, N) ||
      !holds_vectors(weight, N) || weight.dtype() != operands.x.dtype() || vectors > kMostVectors ||
      (wide && norm.heads > 1)) {
    const int64_t blocks = rms_norm_backward_parts(norm.rows);
    const int threads = norm.columns <= 1024 ? 128 : kBackwardThreads;
    launch_kernel(Start::early, reread_kernel<T>, grid_size(blocks), threads, 0, stream, norm,
                  operands.rows<T>(), operands.partial);
    return blocks;
  }
  if (vectors <= 2 * kWarp) return launch_backward<T, N, 2, 2>(stream, norm, lanes_for(vectors, 2, 4), operands);
  if (!wide) return launch_backward<T, N, 1, 4>(stream, norm, kWarp, operands);
  // Few threads with several vectors each: what a row takes besides is little then.
  if (vectors <= 256) return launch_pipelined<T, N, 2, 2, 128>(stream, norm, operands);
  if (vectors <= 512) return launch_pipelined<T, N, 1, 2, 256>(stream, norm, operands);
  if (vectors <= 768) return launch_pipelined<T, N, 1, 3, 256>(stream, norm, operands);
  if (vectors <= 1024) return launch_pipelined<T, N, 1, 4, 256>(stream, norm, operands);
  return launch_pipelined<T, N, 1, 8, 256>(stream, norm, operands);
}

}  // namespace

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
