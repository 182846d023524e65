// SPDX-License-Identifier: Apache-2.0
// d_query in bf16 on mma.sync. As the forward kernel: a block of threads owns 64 queries of one head, each warp 16 of
// them with their gradient in registers, and the keys and values pass by in tiles of 64, two in shared memory.
//
//   ds_ij = p_ij (m_ij <d_out_i, v_j> - delta_i);   d_q_i = scale sum_j ds_ij k_j
#include <cmath>

#include "base/math.h"
#include "ops/cuda/attention_dropout.cuh"
#include "ops/cuda/attention_kernel_list.h"
#include "ops/cuda/attention_launch.cuh"
#include "ops/cuda/attention_tile.cuh"

namespace farspan::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTile = kBoundsRows;  // queries and keys

template <int kHeadSize>
struct SharedDQuery {
  alignas(16) unsigned char query[kTile * kHeadSize * 2];
  alignas(16) unsigned char d_out[kTile * kHeadSize * 2];
  alignas(16) unsigned char key[2][kTile * kHeadSize * 2];
  alignas(16) unsigned char value[2][kTile * kHeadSize * 2];
  unsigned long long mark;
};

template <int kHeadSize, bool kDropout>
__global__ void __launch_bounds__(kThreads) d_query_kernel(const __grid_constant__ BackwardArguments a) {
  SharedDQuery<kHeadSize>& shared = *reinterpret_cast<SharedDQuery<kHeadSize>*>(dynamic_shared());
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;

  // The last queries first: under a causal mask they have the most to do.
  const int tiles = (a.queries + kTile - 1) / kTile;
  const int head = static_cast<int>(blockIdx.x) / tiles;
  const int first_query = (tiles - 1 - static_cast<int>(blockIdx.x) % tiles) * kTile;
  const int kv_head = head / a.group;
  const TileBounds bounds = bounds_of(a, first_query, kTile);
  const int first_key = bounds.first / kTile * kTile;

  int2 sees[2];
  float lse[2], delta[2];  // of rows g and g + 8; lse to base 2
  const float factor = fabsf(a.scale) * kLog2E;
  for (int half = 0; half < 2; ++half) {
    const int query = first_query + warp_row + 8 * half + lane / 4;
    const bool present = query < a.queries;
    sees[half] = present ? a.bounds.rows[query] : int2{0, 0};
    lse[half] = present ? finite_lse(a.lse.data[head * a.lse.head_stride + query]) * kLog2E : 0;
    delta[half] = present ? a.delta.data[head * a.delta.head_stride + query] : 0;
  }

  const auto load = [&](int key, int buffer) {
    load_tile<kHeadSize, kTile, kThreads>(shared.key[buffer], a.key, kv_head, key, a.keys, a.head_size);
    load_tile<kHeadSize, kTile, kThreads>(shared.value[buffer], a.value, kv_head, key, a.keys, a.head_size);
    commit_copies();
  };

  float d_query[1][kHeadSize / 8][4] = {};
  bool poisoned[2] = {};  // the row sees a key that is not finite
  HeadDraws draws(a.dropout, head);
  if (first_key < bounds.last) {
    load_tile<kHeadSize, kTile, kThreads>(shared.query, a.query, head, first_query, a.queries, a.head_size);
    load_tile<kHeadSize, kTile, kThreads>(shared.d_out, a.d_out, head, first_query, a.queries, a.head_size);
    load(first_key, 0);
    if (a.scale < 0) {  // the same scores as with a positive scale and the queries negated
      wait_copies<0>();
      __syncthreads();
      negate_tile<kHeadSize, kTile, kThreads>(shared.query);
    }
  }
  int buffer = 0;
  for (int key = first_key; key < bounds.last; key += kTile, buffer ^= 1) {
    const bool masked = key < bounds.all_first || key + kTile > bounds.all_last;
    if (key + kTile < bounds.last) {
      load(key + kTile, buffer ^ 1);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    if (masked) {
      const uint64_t spoilt = clear_not_finite<kHeadSize, kThreads>(shared.key[buffer], &shared.mark);
      for (int half = 0; half < 2; ++half) poisoned[half] |= (rows_within(sees[half], key) & spoilt) != 0;
    }

    float scores[1][8][4] = {}, ds[1][8][4] = {};
    multiply_rows<kHeadSize, 1>(scores, shared_address(shared.query), warp_row, shared_address(shared.key[buffer]),
                                lane);
    multiply_rows<kHeadSize, 1>(ds, shared_address(shared.d_out), warp_row, shared_address(shared.value[buffer]), lane);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int half = c / 2;
        const int j = key + 8 * n + lane % 4 * 2 + c % 2;
        const float weight = exp2_approximate(fmaf(scores[0][n][c], factor, -lse[half]));
        float d_weight = ds[0][n][c];
        if constexpr (kDropout)
          d_weight = draws.keeps(first_query + warp_row + 8 * half + lane / 4, j) ? d_weight * a.dropout.scale : 0;
        const bool seen = !masked || (j >= sees[half].x && j < sees[half].y);
        ds[0][n][c] = seen ? weight * (d_weight - delta[half]) : 0;
      }
    multiply_columns<kHeadSize, 1, kHeadSize>(d_query, ds, shared_address(shared.key[buffer]), 0, lane);
    __syncthreads();
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = first_query + warp_row + 8 * half + lane / 4;
    if (query >= a.queries || keeps_blind(a, query)) continue;
    const float factor_out = poisoned[half] ? NAN : a.scale;
#pragma unroll
    for (int n = 0; n < kHeadSize / 8; ++n)
      store_pair(a.d_query, head, query, 8 * n + lane % 4 * 2, d_query[0][n][2 * half] * factor_out,
                 d_query[0][n][2 * half + 1] * factor_out, a.head_size, a.add_query);
  }
}

template <int kHeadSize>
void queue(const BackwardArguments& a, cudaStream_t stream) {
  const int64_t blocks = ceil_div(a.queries, kTile) * a.heads;
  launch(a.dropout.threshold > 0 ? d_query_kernel<kHeadSize, true> : d_query_kernel<kHeadSize, false>, blocks, kThreads,
         sizeof(SharedDQuery<kHeadSize>), stream, a);
}

}  // namespace

void attention_d_query_mma(const BackwardArguments& arguments, cudaStream_t stream) {
  if (arguments.head_size <= 64) return queue<64>(arguments, stream);
  if (arguments.head_size <= 128) return queue<128>(arguments, stream);
  queue<256>(arguments, stream);
}

}  // namespace farspan::cuda
