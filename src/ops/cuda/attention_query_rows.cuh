// SPDX-License-Identifier: Apache-2.0
// What the Hopper kernels that own keys know of each tile of queries that passes by, besides the queries.
#pragma once

#include "ops/cuda/attention_hopper.cuh"
#include "ops/cuda/attention_query_walk.cuh"

namespace farspan::cuda {

enum class TileKind : int { plain, masked, end };  // end: there are no more

struct QueryRows {
  TileKind kind;
  alignas(8) float lse[kBoundsRows];  // to base 2
  float delta[kBoundsRows];
  int2 sees[kBoundsRows];
};

// The compiler cannot know that all threads read the same, and would wait for every product in turn.
__device__ inline TileKind kind_of(const QueryRows& rows) {
  return static_cast<TileKind>(__shfl_sync(0xffffffffu, static_cast<int>(rows.kind), 0));
}

// Brings them: the producer's warps 1 and 2, one thread a row, one arrival of each warp at a stage's `full`.
template <int kStages>
class RowReader {
 public:
  __device__ RowReader(QueryRows* rows, CopyBarrier* full, CopyBarrier* free, const BackwardArguments& a)
      : rows_(rows), full_(full), free_(free), a_(a), row_(static_cast<int>(threadIdx.x) - 32) {}

  __device__ void run(QueryWalk walk) {
    for (; !walk.done(); walk.advance()) {
      const int query = walk.first_query() + row_;
      const bool present = query < a_.queries;
      const float lse = present ? finite_lse(a_.lse.data[walk.head() * a_.lse.head_stride + query]) * kLog2E : 0;
      const float delta = present ? a_.delta.data[walk.head() * a_.delta.head_stride + query] : 0;
      const int2 sees = present ? a_.bounds.rows[query] : int2{0, 0};
      barrier_wait(free_[ring_.stage], ring_.parity ^ 1);
      QueryRows& rows = rows_[ring_.stage];
      rows.lse[row_] = lse;
      rows.delta[row_] = delta;
      rows.sees[row_] = sees;
      finish(walk.masked() ? TileKind::masked : TileKind::plain);
    }
    barrier_wait(free_[ring_.stage], ring_.parity ^ 1);
    finish(TileKind::end);
  }

 private:
  __device__ void finish(TileKind kind) {
    if (row_ == 0) rows_[ring_.stage].kind = kind;
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(full_[ring_.stage]);
    ring_.advance();
  }

  QueryRows* rows_;
  CopyBarrier *full_, *free_;
  const BackwardArguments& a_;
  int row_;
  Ring<kStages> ring_;
};

// The producer warpgroup's work: all tiles of the walk, and once more where the block asks for it.
template <typename Copier, int kStages>
__device__ void bring_queries(Copier& copier, RowReader<kStages>& reader, const QueryWalk& walk) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  do {
    if (threadIdx.x == 0) copier.run(walk);
    if (warp == 1 || warp == 2) reader.run(walk);
    __syncwarp();
  } while (__syncthreads_or(0));
}

// What the Hopper kernels that own keys do with a tile of 64 keys by 64 queries, in registers as warpgroup_layout.h says.
using KeyQueryTile = float[32];

// The first of the two neighbouring queries whose pairs are elements i and i + 1.
__device__ inline int tile_query(int i) { return fragment_column(static_cast<int>(threadIdx.x), i); }

// Zero for the pairs that are masked; the thread's keys are `key` and key + 8.
__device__ inline void select_seen(KeyQueryTile& x, const QueryRows& rows, int key) {
#pragma unroll
  for (int i = 0; i < 32; i += 4)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int2 sees = rows.sees[tile_query(i) + c % 2];
      const int mine = key + c / 2 * 8;
      if (mine < sees.x || mine >= sees.y) x[i + c] = 0;
    }
}

// Scores to weights: 2^(factor score - lse).
__device__ inline void weigh_tile(KeyQueryTile& x, const QueryRows& rows, float factor) {
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    const float2 lse = *reinterpret_cast<const float2*>(&rows.lse[tile_query(i)]);
#pragma unroll
    for (int c = 0; c < 4; ++c) x[i + c] = exp2_approximate(fmaf(x[i + c], factor, c % 2 == 0 ? -lse.x : -lse.y));
  }
}

// d_weights to score gradients: weight (d_weight - delta).
__device__ inline void differentiate_tile(KeyQueryTile& x, const KeyQueryTile& weights, const QueryRows& rows) {
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    const float2 delta = *reinterpret_cast<const float2*>(&rows.delta[tile_query(i)]);
#pragma unroll
    for (int c = 0; c < 4; ++c) x[i + c] = weights[i + c] * (x[i + c] - (c % 2 == 0 ? delta.x : delta.y));
  }
}

}  // namespace farspan::cuda
