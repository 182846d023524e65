// SPDX-License-Identifier: Apache-2.0
// What RMSNorm's two directions share: the rows, and which of their columns a thread takes.
#pragma once

#include <cstdint>

#include "ops/cuda/norm_rows.cuh"

namespace farspan::cuda {

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

// lanes, starting at `least` and doubled, until `vectors` fit at `each` per lane.
inline int lanes_for(int64_t vectors, int each, int least) {
  int lanes = least;
  while (int64_t{lanes} * each < vectors) lanes *= 2;
  return lanes;
}

}  // namespace farspan::cuda
