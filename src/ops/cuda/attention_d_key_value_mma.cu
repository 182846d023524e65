// SPDX-License-Identifier: Apache-2.0
// d_key and d_value in bf16 on mma.sync. A block of threads owns the keys of a tile of one key/value head, each warp 16
// of them with both gradients in registers, and the queries of all the group's heads that see any of them pass by in
// tiles of 64, two in shared memory. Everything is computed transposed, keys by queries: then weights and score
// gradients leave one product in the registers in which the next wants them.
//
//   d_v_j = sum_i m_ij p_ij d_out_i;   ds_ij = p_ij (m_ij <d_out_i, v_j> - delta_i);   d_k_j = scale sum_i ds_ij q_i
#include <cmath>

#include "base/math.h"
#include "ops/cuda/attention_dropout.cuh"
#include "ops/cuda/attention_kernel_list.h"
#include "ops/cuda/attention_launch.cuh"
#include "ops/cuda/attention_query_walk.cuh"
#include "ops/cuda/attention_tile.cuh"

namespace farspan::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kQueries = kBoundsRows;  // of a tile

// Warps that share 16 keys: where a head is too long for the registers, each keeps its part of the gradients' columns
// and all compute the scores.
constexpr int sharers(int head_size) { return head_size > 128 ? 2 : 1; }
constexpr int tile_keys(int head_size) { return 16 * kWarps / sharers(head_size); }

template <int kHeadSize>
struct SharedDKeyValue {
  alignas(16) unsigned char key[tile_keys(kHeadSize) * kHeadSize * 2];
  alignas(16) unsigned char value[tile_keys(kHeadSize) * kHeadSize * 2];
  alignas(16) unsigned char query[2][kQueries * kHeadSize * 2];
  alignas(16) unsigned char d_out[2][kQueries * kHeadSize * 2];
  alignas(8) float lse[2][kQueries];  // to base 2
  alignas(8) float delta[2][kQueries];
  int2 rows[2][kQueries];
  unsigned long long mark;
};

template <int kHeadSize>
__device__ void load_queries(SharedDKeyValue<kHeadSize>& shared, const BackwardArguments& a, int head, int first,
                             int buffer) {
  load_tile<kHeadSize, kQueries, kThreads>(shared.query[buffer], a.query, head, first, a.queries, a.head_size);
  load_tile<kHeadSize, kQueries, kThreads>(shared.d_out[buffer], a.d_out, head, first, a.queries, a.head_size);
  commit_copies();
  const int i = static_cast<int>(threadIdx.x);
  if (i >= kQueries) return;
  const int query = first + i;
  const bool present = query < a.queries;
  shared.lse[buffer][i] = present ? finite_lse(a.lse.data[head * a.lse.head_stride + query]) * kLog2E : 0;
  shared.delta[buffer][i] = present ? a.delta.data[head * a.delta.head_stride + query] : 0;
  shared.rows[buffer][i] = present ? a.bounds.rows[query] : int2{0, 0};
}

template <int kHeadSize, bool kDropout>
__global__ void __launch_bounds__(kThreads) d_key_value_kernel(const __grid_constant__ BackwardArguments a) {
  constexpr int kKeys = tile_keys(kHeadSize);
  constexpr int kColumns = kHeadSize / sharers(kHeadSize);
  SharedDKeyValue<kHeadSize>& shared = *reinterpret_cast<SharedDKeyValue<kHeadSize>*>(dynamic_shared());
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_row = warp % (kKeys / 16) * 16;
  const int column_chunk = warp / (kKeys / 16) * (kColumns / 8);

  // The first keys first: under a causal mask they have the most to do.
  const int tiles = (a.keys + kKeys - 1) / kKeys;
  const int kv_head = static_cast<int>(blockIdx.x) / tiles;
  const int first_key = static_cast<int>(blockIdx.x) % tiles * kKeys;

  load_tile<kHeadSize, kKeys, kThreads>(shared.key, a.key, kv_head, first_key, a.keys, a.head_size);
  load_tile<kHeadSize, kKeys, kThreads>(shared.value, a.value, kv_head, first_key, a.keys, a.head_size);
  commit_copies();

  float d_key[1][kColumns / 8][4] = {}, d_value[1][kColumns / 8][4] = {};
  bool poisoned[2] = {};  // the key is seen by a query or an output gradient that is not finite
  const float factor = fabsf(a.scale) * kLog2E;
  QueryWalk walk(a, kv_head, first_key, kKeys);
  if (!walk.done()) load_queries(shared, a, walk.head(), walk.first_query(), 0);
  if (a.scale < 0) {  // the same scores as with a positive scale and the keys negated
    wait_copies<0>();
    __syncthreads();
    negate_tile<kHeadSize, kKeys, kThreads>(shared.key);
  }
  for (int buffer = 0; !walk.done(); buffer ^= 1) {
    const int head = walk.head();
    const int first_query = walk.first_query();
    const bool masked = walk.masked();
    walk.advance();
    if (!walk.done()) {
      load_queries(shared, a, walk.head(), walk.first_query(), buffer ^ 1);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    if (masked) {
      uint64_t spoilt = clear_not_finite<kHeadSize, kThreads>(shared.query[buffer], &shared.mark);
      spoilt |= clear_not_finite<kHeadSize, kThreads>(shared.d_out[buffer], &shared.mark);
      for (int i = 0; spoilt != 0; ++i, spoilt >>= 1)
        for (int half = 0; half < 2; ++half) {
          const int key = first_key + warp_row + 8 * half + lane / 4;
          const int2 sees = shared.rows[buffer][i];
          poisoned[half] |= (spoilt & 1) != 0 && key >= sees.x && key < sees.y;
        }
    }

    float weights[1][8][4] = {};
    multiply_rows<kHeadSize, 1>(weights, shared_address(shared.key), warp_row, shared_address(shared.query[buffer]),
                                lane);
    uint32_t kept = ~0u;  // one bit per weight
    HeadDraws draws(a.dropout, head);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int i = 8 * n + lane % 4 * 2 + c % 2;
        const int key = first_key + warp_row + c / 2 * 8 + lane / 4;
        float& weight = weights[0][n][c];
        weight = exp2_approximate(fmaf(weight, factor, -shared.lse[buffer][i]));
        if (masked) {
          const int2 sees = shared.rows[buffer][i];
          if (key < sees.x || key >= sees.y) weight = 0;
        }
        if constexpr (kDropout)
          if (!draws.keeps(first_query + i, key)) kept &= ~(1u << (4 * n + c));
      }
    if constexpr (kDropout) {
      float kept_weights[1][8][4];
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          kept_weights[0][n][c] = kept >> (4 * n + c) & 1 ? weights[0][n][c] * a.dropout.scale : 0;
      multiply_columns<kHeadSize, 1, kColumns>(d_value, kept_weights, shared_address(shared.d_out[buffer]),
                                               column_chunk, lane);
    } else {
      multiply_columns<kHeadSize, 1, kColumns>(d_value, weights, shared_address(shared.d_out[buffer]), column_chunk,
                                               lane);
    }

    float ds[1][8][4] = {};
    multiply_rows<kHeadSize, 1>(ds, shared_address(shared.value), warp_row, shared_address(shared.d_out[buffer]), lane);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int i = 8 * n + lane % 4 * 2 + c % 2;
        float d_weight = ds[0][n][c];
        if constexpr (kDropout) d_weight = kept >> (4 * n + c) & 1 ? d_weight * a.dropout.scale : 0;
        float score_gradient = weights[0][n][c] * (d_weight - shared.delta[buffer][i]);
        if (masked) {
          const int key = first_key + warp_row + c / 2 * 8 + lane / 4;
          const int2 sees = shared.rows[buffer][i];
          if (key < sees.x || key >= sees.y) score_gradient = 0;
        }
        ds[0][n][c] = score_gradient;
      }
    multiply_columns<kHeadSize, 1, kColumns>(d_key, ds, shared_address(shared.query[buffer]), column_chunk, lane);
    __syncthreads();
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = first_key + warp_row + 8 * half + lane / 4;
    if (key >= a.keys) continue;
    const float factor_key = poisoned[half] ? NAN : a.scale, factor_value = poisoned[half] ? NAN : 1;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const int column = 8 * (column_chunk + n) + lane % 4 * 2;
      store_pair(a.d_key, kv_head, key, column, d_key[0][n][2 * half] * factor_key,
                 d_key[0][n][2 * half + 1] * factor_key, a.head_size, a.add_key_value);
      store_pair(a.d_value, kv_head, key, column, d_value[0][n][2 * half] * factor_value,
                 d_value[0][n][2 * half + 1] * factor_value, a.head_size, a.add_key_value);
    }
  }
}

template <int kHeadSize>
void queue(const BackwardArguments& a, cudaStream_t stream) {
  const int64_t blocks = ceil_div(a.keys, tile_keys(kHeadSize)) * a.kv_heads;
  launch(a.dropout.threshold > 0 ? d_key_value_kernel<kHeadSize, true> : d_key_value_kernel<kHeadSize, false>, blocks,
         kThreads, sizeof(SharedDKeyValue<kHeadSize>), stream, a);
}

}  // namespace

void attention_d_key_value_mma(const BackwardArguments& arguments, cudaStream_t stream) {
  if (arguments.head_size <= 64) return queue<64>(arguments, stream);
  if (arguments.head_size <= 128) return queue<128>(arguments, stream);
  queue<256>(arguments, stream);
}

}  // namespace farspan::cuda
