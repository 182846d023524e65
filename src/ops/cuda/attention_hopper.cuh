// SPDX-License-Identifier: Apache-2.0
// What the Hopper attention kernels share: tiles of one head in shared memory, and rings of them that the copy engine
// fills and warpgroups empty.
#pragma once

#include "ops/cuda/attention_key_tiles.h"
#include "ops/cuda/attention_tile.cuh"
#include "ops/cuda/copy_engine.cuh"
#include "ops/cuda/warpgroup.cuh"
#include "ops/cuda/warpgroup_layout.h"

namespace farspan::cuda {

// A tile of kRows tokens: boxes of 64 columns one after the other, kRows * 128 bytes each.
template <int kHeadSize, int kRows>
__device__ void copy_tile(unsigned char* tile, const TensorMap& map, CopyBarrier& barrier, int head, int token) {
  for (int column = 0; column < kHeadSize; column += 64)
    copy_box(tile + column * kRows * 2, map, barrier, column, head, token);
}

// Registers of a thread where a block is one producer and two consumer warpgroups.
inline constexpr int kProducerRegisters = 24;
inline constexpr int kConsumerRegisters = 240;
static_assert(registers_suffice(kProducerRegisters, kConsumerRegisters, 2));

// Named barriers of the consumers.
inline constexpr int kTurn = 1;  // and on, one for each
inline constexpr int kAllConsumers = 5;

// Those of `queries` queries from `first_query` on.
__device__ inline KeyTiles key_tiles_of(const AttentionArguments& a, int first_query, int queries, int keys) {
  const TileBounds b = bounds_of(a, first_query, queries);
  return {b.first, b.last, b.all_first, b.all_last, keys};
}

// attention_tile.cuh: clear_not_finite, by all threads of the consumers, for a tile of 64 rows that the copy engine
// brought. wgmma sees what they wrote.
template <int kConsumers>
__device__ uint64_t clear_together(unsigned char* tile, int head_size, unsigned long long* mark) {
  constexpr int kThreads = 128 * kConsumers;
  const int thread = static_cast<int>(threadIdx.x) - 128;
  if (thread == 0) *mark = 0;
  named_barrier_sync(kAllConsumers, kThreads);
  uint4* const vectors = reinterpret_cast<uint4*>(tile);
  for (int i = thread; i < 64 * head_size / 8; i += kThreads) {
    uint4& x = vectors[i];
    if (!any_not_finite(x)) continue;
    x = {finite_part(x.x), finite_part(x.y), finite_part(x.z), finite_part(x.w)};
    atomicOr(mark, 1ull << i / 8 % 64);
  }
  fence_async_proxy();
  named_barrier_sync(kAllConsumers, kThreads);
  const uint64_t rows = *mark;
  named_barrier_sync(kAllConsumers, kThreads);
  return rows;
}

// This thread's part of a warpgroup's results (warpgroup_layout.h), of which it has rows `row` and row + 8, each
// times its factor and if it is `stored`: added to what is there, or written over it.
template <int kColumns>
__device__ void store_fragment(const HeadsView& view, int head, int row, const bool (&stored)[2], const float (&x)[kColumns / 2],
                               const float (&factors)[2], int head_size, bool add) {
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
  float2 before[2][kColumns / 8];
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
      before[half][j] =
          pair_before(view, head, row + 8 * half, column + 8 * j, head_size, add && stored[half]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!stored[half]) continue;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
      store_pair(view, head, row + 8 * half, column + 8 * j, x[4 * j + 2 * half] * factors[half],
                 x[4 * j + 2 * half + 1] * factors[half], head_size, before[half][j]);
  }
}

}  // namespace farspan::cuda
