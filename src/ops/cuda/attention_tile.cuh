// SPDX-License-Identifier: Apache-2.0
// Tiles of tokens in shared memory, bf16, for the kernels on mma.sync. A row holds kHeadSize elements (those past the
// true head size are zero) in chunks of 16 bytes; chunk c of row r lies at chunk c ^ (r % 8), so that the eight rows
// that ldmatrix reads together lie in different banks.
#pragma once

#include <cmath>

#include "ops/cuda/attention_arguments.h"
#include "ops/cuda/tensor_core.cuh"

namespace farspan::cuda {

template <int kHeadSize>
struct Tile {
  static constexpr int kChunks = kHeadSize / 8;
  static constexpr int kRowBytes = kHeadSize * 2;

  __device__ static uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ (row & 7)) << 4));
  }
};

inline constexpr float kLog2E = 1.44269504f;

// Of `rows` queries from the multiple of kBoundsRows `first` on.
__device__ inline TileBounds bounds_of(const AttentionArguments& a, int first, int rows) {
  const int end = (min(a.queries, first + rows) + kBoundsRows - 1) / kBoundsRows;
  TileBounds all = a.bounds.tiles[first / kBoundsRows];
  for (int i = first / kBoundsRows + 1; i < end; ++i) {
    const TileBounds t = a.bounds.tiles[i];
    all = {min(all.first, t.first), max(all.last, t.last), max(all.all_first, t.all_first), min(all.all_last, t.all_last)};
  }
  return all;
}

// Whether a query's results are to stay as they are: it sees no key, and such ones keep them.
__device__ inline bool keeps_blind(const AttentionArguments& a, int query) {
  return a.keeps_blind && a.bounds.rows[query].x >= a.bounds.rows[query].y;
}

template <typename T>
__device__ T* head_of(const HeadsView& view, int head) {
  return reinterpret_cast<T*>(view.data) + head * view.head_stride;
}

// Eight elements of a row, the first `count` of them.
__device__ inline uint4 gather_8(const uint16_t* from, int count) {
  uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t low = 2 * w < count ? from[2 * w] : 0;
    const uint32_t high = 2 * w + 1 < count ? from[2 * w + 1] : 0;
    words[w] = low | high << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

// Rows [first, first + kRows) of one head of `view`, those from `tokens` on as zeros. Part of the thread's next group of
// copies.
template <int kHeadSize, int kRows, int kThreads>
__device__ void load_tile(unsigned char* tile, const HeadsView& view, int head, int first, int tokens, int head_size) {
  using Layout = Tile<kHeadSize>;
  const uint16_t* const source = head_of<const uint16_t>(view, head);
  const uint32_t target = shared_address(tile);
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kRows * Layout::kChunks; i += kThreads) {
    const int row = i / Layout::kChunks;
    const int chunk = i % Layout::kChunks;
    const bool present = first + row < tokens && chunk * 8 < head_size;
    const uint16_t* const from = source + (present ? (first + row) * view.token_stride + chunk * 8 : 0);
    const uint32_t offset = Layout::offset(row, chunk);
    if (view.vectors)
      copy_16_async(target + offset, from, present);
    else
      *reinterpret_cast<uint4*>(tile + offset) = gather_8(from, present ? min(8, head_size - chunk * 8) : 0);
  }
}

// -x for every element, in place.
template <int kHeadSize, int kRows, int kThreads>
__device__ void negate_tile(unsigned char* tile) {
  for (int i = static_cast<int>(threadIdx.x); i < kRows * Tile<kHeadSize>::kChunks; i += kThreads) {
    uint4& x = reinterpret_cast<uint4*>(tile)[i];
    x = {x.x ^ 0x80008000u, x.y ^ 0x80008000u, x.z ^ 0x80008000u, x.w ^ 0x80008000u};
  }
}

// A query that has seen nothing has weight exp(score - lse) nowhere; an lse of -inf would make that NaN.
__device__ inline float finite_lse(float lse) { return lse == -INFINITY ? 0 : lse; }

// Bit 0: the lower of two bf16 is infinite or NaN; bit 1: the upper.
__device__ inline uint32_t not_finite(uint32_t pair) {
  return ((pair & 0x7f80u) == 0x7f80u ? 1u : 0u) | ((pair & 0x7f800000u) == 0x7f800000u ? 2u : 0u);
}
__device__ inline uint32_t finite_part(uint32_t pair) {
  const uint32_t bad = not_finite(pair);
  return pair & ((bad & 1 ? 0u : 0xffffu) | (bad & 2 ? 0u : 0xffff0000u));
}
__device__ inline bool any_not_finite(const uint4& x) {
  return (not_finite(x.x) | not_finite(x.y) | not_finite(x.z) | not_finite(x.w)) != 0;
}

// Where a product sums over a tile's rows, an infinity or a NaN times the zero of a masked pair would reach rows that may
// not see it. So in tiles that need a mask they are made zero first, and what may see them is set to NaN by hand. All of
// the block calls this with the tile complete; returned are the rows that held any, one bit each. `mark` is shared.
template <int kHeadSize, int kThreads>
__device__ uint64_t clear_not_finite(unsigned char* tile, unsigned long long* mark) {
  constexpr int kVectors = kBoundsRows * Tile<kHeadSize>::kChunks;
  uint4* const vectors = reinterpret_cast<uint4*>(tile);
  bool found = false;
  for (int i = static_cast<int>(threadIdx.x); i < kVectors; i += kThreads) found |= any_not_finite(vectors[i]);
  if (!__syncthreads_or(found)) return 0;
  if (threadIdx.x == 0) *mark = 0;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kVectors; i += kThreads) {
    uint4& x = vectors[i];
    if (!any_not_finite(x)) continue;
    x = {finite_part(x.x), finite_part(x.y), finite_part(x.z), finite_part(x.w)};
    atomicOr(mark, 1ull << (i / Tile<kHeadSize>::kChunks));
  }
  __syncthreads();
  return *mark;
}

// Bits of the rows [range.x, range.y) among the kBoundsRows from `first` on.
// Not clamped by max(0, min(64, x)): nvcc 13.0 makes one VIMNMX.RELU of that for sm_90, takes its predicate for x >= 64,
// and rows went unnoticed on the GPU.
__device__ inline uint64_t rows_within(int2 range, int first) {
  const auto below = [](int row) { return row >= 64 ? ~0ull : row <= 0 ? 0 : (1ull << row) - 1; };
  return below(range.y - first) & ~below(range.x - first);
}

// Where a lane finds its row of the matrices that ldmatrix loads, chunk `step` of a row being elements 8 step and on.
// For A (rows are the product's rows) and, transposed, for a B whose rows are summed over: matrices 0 and 1 one below
// the other, 2 and 3 to the right of them.
template <int kHeadSize>
__device__ uint32_t stacked_offset(int row, int step, int lane) {
  return Tile<kHeadSize>::offset(row + lane % 16, step + lane / 16);
}
// For a B whose rows are the product's columns: matrices 0 and 1 side by side, 2 and 3 below.
template <int kHeadSize>
__device__ uint32_t paired_offset(int row, int step, int lane) {
  return Tile<kHeadSize>::offset(row + lane % 8 + lane / 16 * 8, step + lane / 8 % 2);
}

// c (16 kRowTiles x 64) += A B^T: A is rows of a tile from `a_row` on, B the 64 rows of another, the sum over the head.
template <int kHeadSize, int kRowTiles>
__device__ void multiply_rows(float (&c)[kRowTiles][8][4], uint32_t a_tile, int a_row, uint32_t b_tile, int lane) {
#pragma unroll
  for (int step = 0; step < kHeadSize / 8; step += 2) {
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
      load_matrices(a[r], a_tile + stacked_offset<kHeadSize>(a_row + 16 * r, step, lane));
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t b[4];
      load_matrices(b, b_tile + paired_offset<kHeadSize>(16 * n, step, lane));
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        multiply_add(c[r][2 * n], a[r], b[0], b[1]);
        multiply_add(c[r][2 * n + 1], a[r], b[2], b[3]);
      }
    }
  }
}

// c (16 kRowTiles x kColumns) += A B: A (16 kRowTiles x 64) the fp32 results `a` rounded to bf16, B kColumns columns,
// from chunk `b_chunk` on, of a tile's 64 rows.
template <int kHeadSize, int kRowTiles, int kColumns>
__device__ void multiply_columns(float (&c)[kRowTiles][kColumns / 8][4], const float (&a)[kRowTiles][8][4],
                                 uint32_t b_tile, int b_chunk, int lane) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t packed[kRowTiles][4];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        packed[r][i] = pack_bf16(a[r][2 * k + i / 2][2 * (i % 2)], a[r][2 * k + i / 2][2 * (i % 2) + 1]);
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t b[4];
      load_matrices_transposed(b, b_tile + stacked_offset<kHeadSize>(16 * k, b_chunk + 2 * n, lane));
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        multiply_add(c[r][2 * n], packed[r], b[0], b[1]);
        multiply_add(c[r][2 * n + 1], packed[r], b[2], b[3]);
      }
    }
  }
}

// Two neighbouring fp32 values of a row, which results will be added to; zeros where `add` is false. A kernel that
// reads all of its values before it writes any does not wait for each anew.
__device__ inline float2 pair_before(const HeadsView& view, int head, int row, int column, int head_size, bool add) {
  if (!add || column >= head_size) return {0, 0};
  const float* const from = head_of<float>(view, head) + row * view.token_stride + column;
  if (view.pairs) return *reinterpret_cast<const float2*>(from);
  return {from[0], column + 1 < head_size ? from[1] : 0};
}

// Two neighbouring results of a row, the second only where the head has it; on top of `before`.
__device__ inline void store_pair(const HeadsView& view, int head, int row, int column, float first, float second,
                                  int head_size, float2 before) {
  if (column >= head_size) return;
  const bool both = column + 1 < head_size;
  const int64_t offset = row * view.token_stride + column;
  if (!view.f32) {
    __nv_bfloat16* const to = head_of<__nv_bfloat16>(view, head) + offset;
    if (view.pairs) {
      *reinterpret_cast<uint32_t*>(to) = pack_bf16(first, second);
      return;
    }
    to[0] = __float2bfloat16_rn(first);
    if (both) to[1] = __float2bfloat16_rn(second);
    return;
  }
  float* const to = head_of<float>(view, head) + offset;
  if (view.pairs) {
    *reinterpret_cast<float2*>(to) = {before.x + first, before.y + second};
    return;
  }
  to[0] = before.x + first;
  if (both) to[1] = before.y + second;
}

// Likewise, read and written at once.
__device__ inline void store_pair(const HeadsView& view, int head, int row, int column, float first, float second,
                                  int head_size, bool add) {
  store_pair(view, head, row, column, first, second, head_size, pair_before(view, head, row, column, head_size, add));
}

}  // namespace farspan::cuda
