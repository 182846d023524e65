// SPDX-License-Identifier: Apache-2.0
// Element-wise kernels over strided views of rank 1 to 4. A body says what happens to N elements that follow each other
// in a row; a thread loads what several of them need before it finishes the first, so that enough is under way:
//
//   struct Body {
//     template <int N> struct Held { ... };                               // in registers between the two calls
//     template <int N> __device__ Held<N> load(const Place<K>& place) const;
//     template <int N> __device__ void finish(const Place<K>& place, const Held<N>& held) const;
//   };
//
// Every element is written by the thread that loaded it, so an output may be an input.
//
// A body that is to know something of all elements says so: what a thread found goes through its calls of finish, and
// all threads of a block leave theirs together.
//
//     struct Found { ... };
//     ... finish(const Place<K>& place, const Held<N>& held, Found& found) const;
//     __device__ void leave(const Found& found) const;
#pragma once

#include <cstdint>

#include "base/math.h"
#include "ops/cuda/early_launch.cuh"
#include "ops/cuda/vector.cuh"

namespace farspan::cuda {

// Where a vector begins: its row and column, and the offset from each operand's first element.
template <int K>
struct Place {
  int64_t row;
  int64_t column;
  int64_t at[K];
};

// K operands of one shape as rows of `columns` elements. Dimensions that follow each other in every operand's memory
// are merged: contiguous operands are one row.
template <int K>
struct Rows {
  int64_t rows = 1;
  int64_t columns = 1;
  int64_t sizes[2] = {1, 1};  // of the second and the third of the dimensions that count the rows
  int64_t strides[K][3] = {};
  bool aligned = true;  // vectors of N elements can be moved by the widest accesses

  __device__ __forceinline__ Place<K> place(int64_t row, int64_t column) const {
    Place<K> place{.row = row, .column = column};
    if (sizes[0] * sizes[1] == 1) {
#pragma unroll
      for (int k = 0; k < K; ++k) place.at[k] = row * strides[k][0] + column;
      return place;
    }
    const int64_t third = row % sizes[1], rest = row / sizes[1];
    const int64_t second = rest % sizes[0], first = rest / sizes[0];
#pragma unroll
    for (int k = 0; k < K; ++k)
      place.at[k] = first * strides[k][0] + second * strides[k][1] + third * strides[k][2] + column;
    return place;
  }
};

// A dimension that is left after merging.
template <int K>
struct MergedDimension {
  int64_t size = 1;
  int64_t strides[K] = {};
};

enum class Merge { all, keep_rows };  // keep_rows: the columns are the last dimension and no more

// For vectors of n elements. Each operand's last dimension is dense; other strides may be 0.
template <int K>
Rows<K> rows_of(int n, const Tensor (&operands)[K], Merge merge = Merge::all) {
  const int rank = operands[0].rank();
  MergedDimension<K> dimensions[Shape::kMaxRank + 1];  // innermost first
  for (int k = 0; k < K; ++k) dimensions[0].strides[k] = 1;
  int last = 0;
  for (int d = rank - 1; d >= 0; --d) {
    const int64_t size = operands[0].dim(d);
    if (size == 1) continue;
    bool follows = d == rank - 1 || last > 0 || merge == Merge::all;
    for (int k = 0; k < K; ++k)
      follows = follows && operands[k].stride(d) == dimensions[last].size * dimensions[last].strides[k];
    if (!follows) {
      ++last;
      for (int k = 0; k < K; ++k) dimensions[last].strides[k] = operands[k].stride(d);
    }
    dimensions[last].size *= size;
  }
  FARSPAN_CHECK(last <= 3, "an element-wise op on views of rank {}", rank);

  Rows<K> view;
  view.columns = dimensions[0].size;
  for (int i = 1; i <= last; ++i) {
    const int place = i == last ? 0 : 3 - i;
    view.rows *= dimensions[i].size;
    if (place > 0) view.sizes[place - 1] = dimensions[i].size;
    for (int k = 0; k < K; ++k) view.strides[k][place] = dimensions[i].strides[k];
  }
  for (int k = 0; k < K; ++k) {
    const int64_t element = size_of(operands[k].dtype());
    const int64_t access = std::min<int64_t>(16, n * element);
    view.aligned = view.aligned && reinterpret_cast<uintptr_t>(operands[k].raw()) % static_cast<uintptr_t>(access) == 0;
    for (const int64_t stride : view.strides[k]) view.aligned = view.aligned && stride * element % access == 0;
  }
  return view;
}

// How blocks of (x, y) threads tile rows of `vectors` vectors, from `first_column` on: a thread takes kVectorsPerThread
// vectors, row_step rows and vector_step vectors apart.
struct Tiling {
  int64_t first_column;
  int64_t vectors;
  uint32_t chunks;  // blocks side by side in one row
  int row_step;
  int vector_step;
};

inline constexpr int kThreads = 256;
inline constexpr int kVectorsPerThread = 2;

template <typename Body>
concept FindsSomething = requires { typename Body::Found; };

template <int N, int K, typename Body>
__global__ void __launch_bounds__(kThreads)
    each_vector_kernel(const Rows<K> view, const Tiling tiling, const Body body) {
  let_next_start();
  const bool down = tiling.row_step > 0;
  const int64_t rows_per_block = blockDim.y * (down ? kVectorsPerThread : 1);
  const int64_t vectors_per_block = blockDim.x * (down ? 1 : kVectorsPerThread);
  const int64_t first_row = blockIdx.x / tiling.chunks * rows_per_block + threadIdx.y;
  const int64_t first_vector = blockIdx.x % tiling.chunks * vectors_per_block + threadIdx.x;
  typename Body::template Held<N> held[kVectorsPerThread];
  Place<K> places[kVectorsPerThread];
  bool inside[kVectorsPerThread];
  await_previous();
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    const int64_t row = first_row + i * tiling.row_step;
    const int64_t vector = first_vector + i * tiling.vector_step;
    inside[i] = row < view.rows && vector < tiling.vectors;
    if (!inside[i]) continue;
    places[i] = view.place(row, tiling.first_column + vector * N);
    held[i] = body.template load<N>(places[i]);
  }
  if constexpr (FindsSomething<Body>) {
    typename Body::Found found;
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i)
      if (inside[i]) body.template finish<N>(places[i], held[i], found);
    body.leave(found);
  } else {
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i)
      if (inside[i]) body.template finish<N>(places[i], held[i]);
  }
}

template <int N, int K, typename Body>
void launch_tiles(cudaStream_t stream, const Rows<K>& view, int64_t begin, int64_t end, const Body& body) {
  const int64_t vectors = (end - begin) / N;
  Tiling tiling{.first_column = begin, .vectors = vectors, .chunks = 1, .row_step = 0, .vector_step = 0};
  dim3 block(kThreads);
  int64_t blocks = 0;
  if (vectors >= kThreads * kVectorsPerThread) {
    tiling.vector_step = kThreads;
    const int64_t chunks = ceil_div(vectors, kThreads * kVectorsPerThread);
    blocks = checked_mul(view.rows, chunks);
    tiling.chunks = static_cast<uint32_t>(chunks);
  } else {
    const int64_t chunks = ceil_div(vectors, kThreads);
    block.x = static_cast<unsigned int>(ceil_div(vectors, chunks));
    block.y = kThreads / block.x;
    tiling.row_step = static_cast<int>(block.y);
    tiling.chunks = static_cast<uint32_t>(chunks);
    blocks = checked_mul(ceil_div(view.rows, int64_t{block.y} * kVectorsPerThread), chunks);
  }
  FARSPAN_CHECK(blocks <= INT32_MAX, "an element-wise op on {} rows of {} elements: too many for one launch", view.rows,
                view.columns);
  launch_kernel(Start::early, each_vector_kernel<N, K, Body>, dim3(static_cast<unsigned int>(blocks)), block, 0, stream,
                view, tiling, body);
}

// Runs the body on every element: vectors of N as far as they go, single elements where addresses forbid them and at
// the ends of rows. `view` is rows_of(N, ...), with operands that have elements.
template <int N, int K, typename Body>
void for_each_vector(cudaStream_t stream, const Rows<K>& view, const Body& body) {
  const int64_t whole = view.aligned ? round_down(view.columns, N) : 0;
  if (whole > 0) launch_tiles<N>(stream, view, 0, whole, body);
  if (whole < view.columns) launch_tiles<1>(stream, view, whole, view.columns, body);
}

}  // namespace farspan::cuda
