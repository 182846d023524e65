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

// Rounded to bf16: results as the A of the next product.
template <int kColumns>
__device__ inline void pack_results(uint32_t (&packed)[kColumns / 16][4], const float (&x)[kColumns / 2]) {
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[k][i] = pack_bf16(x[8 * k + 2 * i], x[8 * k + 2 * i + 1]);
}

// The operand `offset` bytes further in the same tile.
__device__ inline uint64_t further(uint64_t operand, uint32_t offset) { return operand + offset / 16; }

// c (64 x kRows) = A B^T, begun: both lie in shared memory with the head along their rows.
template <int kHeadSize, int kRows>
__device__ inline void multiply_heads(float (&c)[kRows / 2], uint32_t a, uint32_t b) {
  // Else operands that stay where they are take registers for every k, in a loop of such products.
  asm volatile("" : "+r"(a), "+r"(b));
  const uint64_t first_a = operand<Major::summed>(a), first_b = operand<Major::summed>(b);
#pragma unroll
  for (int k = 0; k < kHeadSize / 16; ++k)
    warpgroup_multiply<Major::summed>(c, further(first_a, summed_offset<64>(k)),
                                      further(first_b, summed_offset<kRows>(k)), k > 0);
}
// The same, A in registers.
template <int kHeadSize, int kRows>
__device__ inline void multiply_heads(float (&c)[kRows / 2], const uint32_t (&a)[kHeadSize / 16][4], uint32_t b) {
  const uint64_t first_b = operand<Major::summed>(b);
#pragma unroll
  for (int k = 0; k < kHeadSize / 16; ++k)
    warpgroup_multiply<Major::summed>(c, a[k], further(first_b, summed_offset<kRows>(k)), k > 0);
}

// Sums of a warpgroup's 64 rows, as wide as a head: this thread's part (warpgroup_layout.h), rows `row` and row + 8.
template <int kHeadSize>
class RowSums {
 public:
  __device__ void clear() {
#pragma unroll
    for (int p = 0; p < kProducts; ++p)
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) x_[p][i] = 0;
  }

  __device__ void pin() {
#pragma unroll
    for (int p = 0; p < kProducts; ++p) cuda::pin(x_[p]);
  }

  // += A B, begun: A in registers, B a tile of kRows rows.
  template <int kRows>
  __device__ void multiply_rows(const uint32_t (&a)[kRows / 16][4], uint32_t tile) {
    const uint64_t first = operand<Major::kept>(tile, kRows * 128);
    pin();
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k)
#pragma unroll
      for (int p = 0; p < kProducts; ++p)
        warpgroup_multiply<Major::kept>(x_[p], a[k], further(first, kept_offset<kRows>(k, p * kColumns)), true);
  }

  // Adds 0 for every finite sum, NaN for any other.
  __device__ float probe() const {
    float probe = 0;
#pragma unroll
    for (int p = 0; p < kProducts; ++p)
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) probe = fmaf(x_[p][i], 0.0f, probe);
    return probe;
  }

  // Each row times its factor and if it is `stored`: added to what is there, or written over it.
  __device__ void store(const HeadsView& view, int head, int row, const bool (&stored)[2], const float (&factors)[2],
                        int head_size, bool add) const {
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
      const auto column = [&](int j) { return kColumns * p + 8 * j + static_cast<int>(threadIdx.x) % 4 * 2; };
      float2 before[2][kColumns / 8];
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j)
          before[half][j] = pair_before(view, head, row + 8 * half, column(j), head_size, add && stored[half]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!stored[half]) continue;
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j)
          store_pair(view, head, row + 8 * half, column(j), x_[p][4 * j + 2 * half] * factors[half],
                     x_[p][4 * j + 2 * half + 1] * factors[half], head_size, before[half][j]);
      }
    }
  }

 private:
  static constexpr int kColumns = kHeadSize <= 128 ? kHeadSize : 128;  // of one product
  static constexpr int kProducts = kHeadSize / kColumns;
  float x_[kProducts][kColumns / 2];
};

}  // namespace farspan::cuda
