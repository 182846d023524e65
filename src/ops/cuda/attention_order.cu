// SPDX-License-Identifier: Apache-2.0
#include "ops/cuda/attention_order.h"

#include "base/math.h"
#include "ops/cuda/attention_launch.cuh"
#include "ops/cuda/attention_tile.cuh"

namespace farspan::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
// Classes of like work, one for each lane of a warp: class c has [2^(c - 1), 2^c) units. Taken from the last to the first.
constexpr int kClasses = 32;

// Tiles whose order is to be found.
struct Tiles {
  TilePlace* order = nullptr;
  int count = 0;
  int rows = 0;  // of a tile
  int heads = 0;
  bool of_keys = false;
};

// Units of 64 keys that a tile of queries goes over, or of 64 queries that one of keys does.
__device__ int work_of(const AttentionArguments& a, const Tiles& tiles, int tile) {
  const int first = tile * tiles.rows;
  int2 range;
  if (tiles.of_keys) {
    range = a.bounds.key_tiles[first / kBoundsRows];
    for (int row = first + kBoundsRows; row < min(a.keys, first + tiles.rows); row += kBoundsRows) {
      const int2 next = a.bounds.key_tiles[row / kBoundsRows];
      if (next.x == next.y) continue;
      range = range.x == range.y ? next : int2{min(range.x, next.x), max(range.y, next.y)};
    }
    return range.y - range.x;
  }
  const TileBounds seen = bounds_of(a, first, tiles.rows);
  return seen.first < seen.last ? (seen.last - seen.first + kBoundsRows - 1) / kBoundsRows : 0;
}

__device__ int class_of(int work) { return 32 - __clz(work); }

// One block of threads for each of the two: a stable sort by class.
__global__ void __launch_bounds__(kThreads) order_kernel(AttentionArguments a, Tiles first, Tiles second) {
  let_next_start();
  await_previous();
  const Tiles tiles = blockIdx.x == 0 ? first : second;
  __shared__ int sizes[kClasses];          // tiles of each class
  __shared__ int begins[kClasses];         // of the class in the order of one head
  __shared__ int found[kClasses];          // tiles of the class before the current ones
  __shared__ int of_warp[kWarps][kClasses];  // of the current ones
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;

  if (thread < kClasses) sizes[thread] = found[thread] = 0;
  __syncthreads();
  for (int tile = thread; tile < tiles.count; tile += kThreads) atomicAdd(&sizes[class_of(work_of(a, tiles, tile))], 1);
  __syncthreads();
  if (thread == 0)
    for (int c = kClasses - 1, at = 0; c >= 0; --c) {
      begins[c] = at;
      at += sizes[c];
    }
  for (int base = 0; base < tiles.count; base += kThreads) {
    of_warp[warp][lane] = 0;
    __syncthreads();
    const bool present = base + thread < tiles.count;
    // Under a causal mask the last queries and the first keys have the most to do.
    const int tile = tiles.of_keys ? base + thread : tiles.count - 1 - base - thread;
    const int mine = present ? class_of(work_of(a, tiles, tile)) : kClasses;
    const unsigned alike = __match_any_sync(0xffffffffu, mine);
    const int before = __popc(alike & ((1u << lane) - 1));
    if (present && before == 0) of_warp[warp][mine] = __popc(alike);
    __syncthreads();
    if (present) {
      int at = found[mine] + before;
      for (int w = 0; w < warp; ++w) at += of_warp[w][mine];
      for (int head = 0; head < tiles.heads; ++head)
        tiles.order[int64_t{begins[mine]} * tiles.heads + int64_t{head} * sizes[mine] + at] = {tile, head};
    }
    __syncthreads();
    if (thread < kClasses)
      for (int w = 0; w < kWarps; ++w) found[thread] += of_warp[w][thread];
    __syncthreads();
  }
}

Tiles query_tiles(const AttentionArguments& a, int rows) {
  return {.order = a.query_order, .count = (a.queries + rows - 1) / rows, .rows = rows, .heads = a.heads};
}

}  // namespace

void order_query_tiles(const AttentionArguments& arguments, int rows, cudaStream_t stream) {
  launch(Start::early, order_kernel, 1, kThreads, 0, stream, arguments, query_tiles(arguments, rows), Tiles{});
}

void order_tiles(const BackwardArguments& arguments, int query_rows, int key_rows, cudaStream_t stream) {
  const Tiles of_keys{.order = arguments.key_order,
                      .count = (arguments.keys + key_rows - 1) / key_rows,
                      .rows = key_rows,
                      .heads = arguments.kv_heads,
                      .of_keys = true};
  launch(Start::early, order_kernel, 2, kThreads, 0, stream, static_cast<const AttentionArguments&>(arguments),
         query_tiles(arguments, query_rows), of_keys);
}

}  // namespace farspan::cuda
