// SPDX-License-Identifier: Apache-2.0
// What the kernels of the norms share: the rows of (T, H) and (T, A, D) views, and how a block leaves its share of the
// weight gradient.
#pragma once

#include <cstdint>

#include "ops/cuda/vector.cuh"

namespace farspan::cuda {

// Row r of a (T, A, D) view is head r % A of token r / A.
struct RowIndex {
  int64_t token;
  int64_t head;
};

__device__ __forceinline__ RowIndex row_index(int64_t row, int64_t heads) {
  return heads == 1 ? RowIndex{row, 0} : RowIndex{row / heads, row % heads};
}

// `step` rows further, without a division.
__device__ __forceinline__ RowIndex advanced(RowIndex index, RowIndex step, int64_t heads) {
  const int64_t head = index.head + step.head;
  const bool next_token = head >= heads;
  return {index.token + step.token + (next_token ? 1 : 0), next_token ? head - heads : head};
}

template <typename T>
struct NormRows {
  T* data;
  int64_t token_stride;
  int64_t head_stride;

  explicit NormRows(const Tensor& x)
      : data(x.data<T>()), token_stride(x.stride(0)), head_stride(x.rank() == 3 ? x.stride(1) : 0) {}

  __device__ __forceinline__ T* at(RowIndex index) const {
    return data + index.token * token_stride + index.head * head_stride;
  }
};

inline int64_t heads_of(const Tensor& x) { return x.rank() == 3 ? x.dim(1) : 1; }
inline int64_t row_count(const Tensor& x) { return x.dim(0) * heads_of(x); }

// Writes one row of partial sums: the sums of the block's groups of threads, each of which holds V vectors' worth for
// the columns from first_columns[v] on, a multiple of N. `shared`: groups x columns floats, from a multiple
// of 16 bytes on, where there is more than one group.
template <int V, int N>
__device__ __forceinline__ void leave_partial_row(const float (&sums)[V][N], const int64_t (&first_columns)[V],
                                                  int64_t columns, int group, int groups, float* shared, float* row) {
  float* const own = groups == 1 ? row : shared + group * columns;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (first_columns[v] >= columns) continue;
    Vector<float, N> vector;
    vector.set(sums[v]);
    vector.store(own + first_columns[v]);
  }
  if (groups == 1) return;
  __syncthreads();
  const int threads = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  const int thread = static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
  for (int64_t column = thread; column < columns; column += threads) {
    float sum = shared[column];
    for (int g = 1; g < groups; ++g) sum += shared[g * columns + column];
    row[column] = sum;
  }
}

}  // namespace farspan::cuda
