// SPDX-License-Identifier: Apache-2.0
#include "ops/cuda/attention_bounds.h"

#include <climits>

#include "base/math.h"
#include "device/cuda/cuda.h"
#include "ops/cuda/attention_launch.cuh"

namespace farspan::cuda {
namespace {

constexpr int kWarps = 4;  // of a block; each takes one tile

__device__ int warp_min(int x) {
  for (int distance = 16; distance > 0; distance /= 2) x = min(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}
__device__ int warp_max(int x) { return -warp_min(-x); }

// A row position as a number of the block's key, held to [0, keys].
__device__ int key_of(int64_t position, int64_t key_begin, int keys) {
  if (position <= key_begin) return 0;
  return position >= key_begin + keys ? keys : static_cast<int>(position - key_begin);
}

__global__ void query_bounds_kernel(const int64_t* lo, const int64_t* hi, int64_t lo_stride, int64_t hi_stride,
                                    int64_t key_begin, int queries, int keys, BlockBounds bounds) {
  let_next_start();
  await_previous();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int tile = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (tile * kBoundsRows >= queries) return;
  TileBounds t{INT_MAX, 0, 0, INT_MAX};
  for (int i = tile * kBoundsRows + lane; i < min(queries, (tile + 1) * kBoundsRows); i += 32) {
    int2 row{key_of(lo[i * lo_stride], key_begin, keys), key_of(hi[i * hi_stride], key_begin, keys)};
    if (row.x >= row.y) {
      row = {0, 0};
      t.all_first = INT_MAX;
      t.all_last = 0;
    } else {
      t = {min(t.first, row.x), max(t.last, row.y), max(t.all_first, row.x), min(t.all_last, row.y)};
    }
    bounds.rows[i] = row;
  }
  t = {warp_min(t.first), warp_max(t.last), warp_max(t.all_first), warp_min(t.all_last)};
  if (lane == 0) bounds.tiles[tile] = t;
}

__global__ void key_bounds_kernel(int query_tiles, int key_tiles, BlockBounds bounds) {
  let_next_start();
  await_previous();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int key_tile = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (key_tile >= key_tiles) return;
  const int begin = key_tile * kBoundsRows;
  int first = INT_MAX, last = 0;
  for (int q = lane; q < query_tiles; q += 32) {
    const TileBounds t = bounds.tiles[q];
    if (t.first >= begin + kBoundsRows || t.last <= begin) continue;
    first = min(first, q);
    last = max(last, q + 1);
  }
  first = warp_min(first);
  last = warp_max(last);
  if (lane == 0) bounds.key_tiles[key_tile] = first < last ? int2{first, last} : int2{0, 0};
}

}  // namespace

BlockBounds place_query_bounds(ScratchParts& scratch, int64_t queries) {
  return {.rows = scratch.take_array<int2>(queries),
          .tiles = scratch.take_array<TileBounds>(ceil_div(queries, kBoundsRows))};
}

void find_query_bounds(const AttentionBlock& block, const BlockBounds& bounds, cudaStream_t stream) {
  const int64_t queries = block.query.dim(0);
  const int64_t blocks = ceil_div(ceil_div(queries, kBoundsRows), kWarps);
  launch(Start::early, query_bounds_kernel, blocks, 32 * kWarps, 0, stream, block.lo.data<int64_t>(),
         block.hi.data<int64_t>(), block.lo.stride(0), block.hi.stride(0), block.key_begin, static_cast<int>(queries),
         static_cast<int>(block.key.dim(0)), bounds);
}

void find_key_bounds(const AttentionBlock& block, const BlockBounds& bounds, cudaStream_t stream) {
  const int query_tiles = static_cast<int>(ceil_div(block.query.dim(0), kBoundsRows));
  const int key_tiles = static_cast<int>(ceil_div(block.key.dim(0), kBoundsRows));
  launch(Start::early, key_bounds_kernel, ceil_div(key_tiles, kWarps), 32 * kWarps, 0, stream, query_tiles, key_tiles,
         bounds);
}

}  // namespace farspan::cuda
