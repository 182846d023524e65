// SPDX-License-Identifier: Apache-2.0
// Forward attention in bf16 on mma.sync (Ampere and later): any head size up to 256, any alignment, dropout.
//
// A block of threads owns a tile of queries of one head; each warp owns 16 or 32 of its rows and keeps their output,
// row maxima and row sums in registers while tiles of 64 keys pass by in shared memory. Scores become weights in the
// registers in which the next product wants them. The values of a tile are on their way while its scores are computed,
// and the next tile's keys while its values are used.
//
// Sources: Milakov and Gimelshein, Online normalizer calculation for softmax (2018), algorithm 3; Dao, FlashAttention-2
// (2023), section 3.1 and 3.3.
#include <cmath>

#include "base/math.h"
#include "ops/cuda/attention_dropout.cuh"
#include "ops/cuda/attention_kernel_list.h"
#include "ops/cuda/attention_launch.cuh"
#include "ops/cuda/attention_state.cuh"
#include "ops/cuda/attention_tile.cuh"

namespace farspan::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kKeys = kBoundsRows;  // of a tile

// Rows of 16 queries of a warp: two share every fragment of keys and values, but need twice the registers.
constexpr int row_tiles(int head_size) { return head_size <= 128 ? 2 : 1; }
constexpr int tile_queries(int head_size) { return 16 * kWarps * row_tiles(head_size); }

template <int kHeadSize>
struct SharedForward {
  alignas(16) unsigned char query[tile_queries(kHeadSize) * kHeadSize * 2];
  alignas(16) unsigned char key[kKeys * kHeadSize * 2];
  alignas(16) unsigned char value[kKeys * kHeadSize * 2];
  int2 rows[tile_queries(kHeadSize)];  // keys that each query sees
  unsigned long long mark;
};

// What a thread knows of rows g and g + 8 of each of its row tiles. `sum` is of this thread's columns only.
template <int kRowTiles>
struct Rows {
  float maximum[kRowTiles][2];
  float sum[kRowTiles][2];
};

// Scores to weights, 2^(factor * (score - row maximum)); brings maximum, sum and the output so far up to date. kExact:
// a score that is its row's maximum has the weight 1 and not nearly 1.
template <bool kExact, int kRowTiles, int kColumns>
__device__ void weigh(float (&scores)[kRowTiles][8][4], float (&out)[kRowTiles][kColumns / 8][4], Rows<kRowTiles>& rows,
                      float factor) {
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float maximum = rows.maximum[r][half];
#pragma unroll
      for (int n = 0; n < 8; ++n) maximum = fmaxf(maximum, fmaxf(scores[r][n][2 * half], scores[r][n][2 * half + 1]));
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 2));
      const float base = maximum == -INFINITY ? 0 : maximum;  // nothing seen yet: all weights are 2^-inf
      const float shrink = exp2_approximate((rows.maximum[r][half] - base) * factor);
      const float shift = -base * factor;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int c = 2 * half; c < 2 * half + 2; ++c) {
          float& x = scores[r][n][c];
          x = exp2_approximate(kExact ? (x - base) * factor : fmaf(x, factor, shift));
          sum += x;
        }
      rows.maximum[r][half] = maximum;
      rows.sum[r][half] = rows.sum[r][half] * shrink + sum;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        out[r][n][2 * half] *= shrink;
        out[r][n][2 * half + 1] *= shrink;
      }
    }
}

template <int kHeadSize, bool kDropout>
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ ForwardArguments a) {
  constexpr int kRowTiles = row_tiles(kHeadSize);
  constexpr int kQueries = tile_queries(kHeadSize);
  SharedForward<kHeadSize>& shared = *reinterpret_cast<SharedForward<kHeadSize>*>(dynamic_shared());
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16 * kRowTiles;

  // The last queries first: under a causal mask they have the most to do.
  const int tiles = (a.queries + kQueries - 1) / kQueries;
  const int head = static_cast<int>(blockIdx.x) / tiles;
  const int first_query = (tiles - 1 - static_cast<int>(blockIdx.x) % tiles) * kQueries;
  const int kv_head = head / a.group;

  for (int i = static_cast<int>(threadIdx.x); i < kQueries; i += kThreads)
    shared.rows[i] = first_query + i < a.queries ? a.bounds.rows[first_query + i] : int2{0, 0};
  const TileBounds bounds = bounds_of(a, first_query, kQueries);
  const int first_key = bounds.first / kKeys * kKeys;

  const auto load_keys = [&](int key) {
    load_tile<kHeadSize, kKeys, kThreads>(shared.key, a.key, kv_head, key, a.keys, a.head_size);
    commit_copies();
  };
  const auto load_values = [&](int key) {
    load_tile<kHeadSize, kKeys, kThreads>(shared.value, a.value, kv_head, key, a.keys, a.head_size);
    commit_copies();
  };

  float out[kRowTiles][kHeadSize / 8][4] = {};
  Rows<kRowTiles> rows;
  bool poisoned[kRowTiles][2] = {};  // the row sees a value that is not finite
  for (int r = 0; r < kRowTiles; ++r)
    for (int half = 0; half < 2; ++half) {
      rows.maximum[r][half] = -INFINITY;
      rows.sum[r][half] = 0;
    }
  HeadDraws draws(a.dropout, head);

  // A negative scale is a positive one with the queries negated; a scale of 0 stays a number that -inf can be
  // multiplied by.
  const float factor = fmaxf(fabsf(a.scale), 1e-30f) * kLog2E;
  if (first_key < bounds.last) {
    load_tile<kHeadSize, kQueries, kThreads>(shared.query, a.query, head, first_query, a.queries, a.head_size);
    load_keys(first_key);
    if (a.scale < 0) {
      wait_copies<0>();
      __syncthreads();
      negate_tile<kHeadSize, kQueries, kThreads>(shared.query);
    }
  }
  for (int key = first_key; key < bounds.last; key += kKeys) {
    const bool masked = key < bounds.all_first || key + kKeys > bounds.all_last;
    wait_copies<0>();
    __syncthreads();
    load_values(key);

    float scores[kRowTiles][8][4] = {};
    multiply_rows<kHeadSize, kRowTiles>(scores, shared_address(shared.query), warp_row, shared_address(shared.key),
                                        lane);
    wait_copies<0>();
    __syncthreads();
    if (key + kKeys < bounds.last) load_keys(key + kKeys);

    if (masked) {
      const uint64_t spoilt = clear_not_finite<kHeadSize, kThreads>(shared.value, &shared.mark);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int2 sees = shared.rows[warp_row + 16 * r + 8 * half + lane / 4];
          poisoned[r][half] |= (rows_within(sees, key) & spoilt) != 0;
#pragma unroll
          for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const int j = key + 8 * n + lane % 4 * 2 + c;
              if (j < sees.x || j >= sees.y) scores[r][n][2 * half + c] = -INFINITY;
            }
        }
      weigh<true, kRowTiles, kHeadSize>(scores, out, rows, factor);
    } else {
      weigh<false, kRowTiles, kHeadSize>(scores, out, rows, factor);
    }
    if constexpr (kDropout) {
      for (int r = 0; r < kRowTiles; ++r)
        for (int half = 0; half < 2; ++half)
          for (int n = 0; n < 8; ++n)
            for (int c = 0; c < 2; ++c)
              if (!draws.keeps(first_query + warp_row + 16 * r + 8 * half + lane / 4, key + 8 * n + lane % 4 * 2 + c))
                scores[r][n][2 * half + c] = 0;
    }
    multiply_columns<kHeadSize, kRowTiles, kHeadSize>(out, scores, shared_address(shared.value), 0, lane);
  }

#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_query + warp_row + 16 * r + 8 * half + lane / 4;
      float sum = rows.sum[r][half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (poisoned[r][half]) sum = NAN;
      StateUpdate update(a, head, query, rows.maximum[r][half] * fabsf(a.scale), sum);
      __syncwarp();  // the row's four lanes have read its lse
      if (lane % 4 == 0) update.store_lse();
#pragma unroll
      for (int n = 0; n < kHeadSize / 8; ++n) {
        const int column = 8 * n + lane % 4 * 2;
        update.store_out(column, out[r][n][2 * half], out[r][n][2 * half + 1], update.before(column));
      }
    }
}

template <int kHeadSize, bool kDropout>
void queue(const ForwardArguments& a, cudaStream_t stream) {
  const int64_t blocks = ceil_div(a.queries, tile_queries(kHeadSize)) * a.heads;
  launch(forward_kernel<kHeadSize, kDropout>, blocks, kThreads, sizeof(SharedForward<kHeadSize>), stream, a);
}

template <int kHeadSize>
void queue(const ForwardArguments& a, cudaStream_t stream) {
  if (a.dropout.threshold > 0)
    queue<kHeadSize, true>(a, stream);
  else
    queue<kHeadSize, false>(a, stream);
}

}  // namespace

void attention_forward_mma(const ForwardArguments& arguments, cudaStream_t stream) {
  if (arguments.head_size <= 64) return queue<64>(arguments, stream);
  if (arguments.head_size <= 128) return queue<128>(arguments, stream);
  queue<256>(arguments, stream);
}

}  // namespace farspan::cuda
