// SPDX-License-Identifier: Apache-2.0
// Gradients of attention in fp32 throughout: for results as exact as the CPU's, not for speed. One kernel owns queries
// and sums over keys, the other owns keys and sums over queries.
#include "base/math.h"
#include "ops/cuda/attention_fp32.cuh"
#include "ops/cuda/attention_kernel_list.h"
#include "ops/cuda/attention_launch.cuh"
#include "ops/cuda/attention_query_walk.cuh"

namespace farspan::cuda {
namespace {

// A query's part of the gradients: what it sees, and the sums over all its keys.
struct QueryRow {
  int2 sees;
  float lse, delta;
};

__device__ QueryRow query_row(const BackwardArguments& a, int head, int query) {
  if (query >= a.queries) return {{0, 0}, 0, 0};
  return {a.bounds.rows[query], finite_lse(a.lse.data[head * a.lse.head_stride + query]),
          a.delta.data[head * a.delta.head_stride + query]};
}

// A pair's weight, as it multiplies d_out (dropped or scaled), and the gradient of its score before the scale.
struct PairGradient {
  float weight, d_score;
};

__device__ PairGradient pair_gradient(const BackwardArguments& a, HeadDraws& draws, const QueryRow& row, int query,
                                      int key, float product, float d_weight) {
  if (key < row.sees.x || key >= row.sees.y) return {0, 0};
  const float weight = expf(product * a.scale - row.lse);
  float kept = 1;
  if (a.dropout.threshold > 0) kept = draws.keeps(query, key) ? a.dropout.scale : 0;
  return {weight * kept, weight * (kept * d_weight - row.delta)};
}

template <int kHeadSize>
struct SharedBackward {
  typename Fp32<kHeadSize>::Tokens query, d_out, key, value;
  typename Fp32<kHeadSize>::Pairs weights, d_scores;
  QueryRow rows[Fp32<kHeadSize>::kTile];
};

template <int kHeadSize>
__device__ void load_queries(SharedBackward<kHeadSize>& shared, const BackwardArguments& a, int head, int first) {
  using F = Fp32<kHeadSize>;
  F::load(shared.query, a.query, head, first, a.queries, a.head_size);
  F::load(shared.d_out, a.d_out, head, first, a.queries, a.head_size);
  for (int i = static_cast<int>(threadIdx.x); i < F::kTile; i += kFp32Threads)
    shared.rows[i] = query_row(a, head, first + i);
}

template <int kHeadSize>
__global__ void __launch_bounds__(kFp32Threads) d_query_kernel(const __grid_constant__ BackwardArguments a) {
  using F = Fp32<kHeadSize>;
  constexpr int kTile = F::kTile, kRows = F::kRows;
  SharedBackward<kHeadSize>& shared = *reinterpret_cast<SharedBackward<kHeadSize>*>(dynamic_shared());
  const int tiles = (a.queries + kTile - 1) / kTile;
  const int head = static_cast<int>(blockIdx.x) / tiles;
  const int first_query = (tiles - 1 - static_cast<int>(blockIdx.x) % tiles) * kTile;
  const int kv_head = head / a.group;
  const TileBounds bounds = bounds_of(a, first_query, kTile);

  load_queries(shared, a, head, first_query);
  typename F::Results d_query{};
  float shrink[kRows];
  for (int r = 0; r < kRows; ++r) shrink[r] = 1;
  HeadDraws draws(a.dropout, head);
  for (int key = bounds.first / kTile * kTile; key < bounds.last; key += kTile) {
    __syncthreads();
    F::load(shared.key, a.key, kv_head, key, a.keys, a.head_size);
    F::load(shared.value, a.value, kv_head, key, a.keys, a.head_size);
    __syncthreads();
    typename F::Scores scores, d_weights;
    F::multiply(scores, shared.query, shared.key);
    F::multiply(d_weights, shared.d_out, shared.value);
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kRows; ++c) {
        const int row = F::y() + 16 * r;
        scores[r][c] = pair_gradient(a, draws, shared.rows[row], first_query + row, key + F::x() + 16 * c, scores[r][c],
                                     d_weights[r][c])
                           .d_score;
      }
    F::store(shared.d_scores, scores);
    __syncthreads();
    F::accumulate(d_query, shrink, shared.d_scores, shared.key, [&](int row, int c) {
      return key + c >= shared.rows[row].sees.x && key + c < shared.rows[row].sees.y;
    });
  }
  const auto stored = [&](int query) { return query < a.queries && !keeps_blind(a, query); };
  F::store(d_query, a.d_query, head, first_query, stored, a.head_size, a.scale, a.add_query);
}

template <int kHeadSize>
__global__ void __launch_bounds__(kFp32Threads) d_key_value_kernel(const __grid_constant__ BackwardArguments a) {
  using F = Fp32<kHeadSize>;
  constexpr int kTile = F::kTile, kRows = F::kRows;
  SharedBackward<kHeadSize>& shared = *reinterpret_cast<SharedBackward<kHeadSize>*>(dynamic_shared());
  const int tiles = (a.keys + kTile - 1) / kTile;
  const int kv_head = static_cast<int>(blockIdx.x) / tiles;
  const int first_key = static_cast<int>(blockIdx.x) % tiles * kTile;

  F::load(shared.key, a.key, kv_head, first_key, a.keys, a.head_size);
  F::load(shared.value, a.value, kv_head, first_key, a.keys, a.head_size);
  typename F::Results d_key{}, d_value{};
  float shrink[kRows];
  for (int r = 0; r < kRows; ++r) shrink[r] = 1;
  for (QueryWalk walk(a, kv_head, first_key, kTile); !walk.done(); walk.advance()) {
    HeadDraws draws(a.dropout, walk.head());
    for (int first_query = walk.first_query(); first_query < walk.first_query() + kBoundsRows; first_query += kTile) {
      __syncthreads();
      load_queries(shared, a, walk.head(), first_query);
      __syncthreads();
      typename F::Scores weights, d_scores;
      F::multiply(weights, shared.key, shared.query);
      F::multiply(d_scores, shared.value, shared.d_out);
      for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < kRows; ++c) {
          const int row = F::x() + 16 * c;
          const PairGradient pair = pair_gradient(a, draws, shared.rows[row], first_query + row,
                                                  first_key + F::y() + 16 * r, weights[r][c], d_scores[r][c]);
          weights[r][c] = pair.weight;
          d_scores[r][c] = pair.d_score;
        }
      F::store(shared.weights, weights);
      F::store(shared.d_scores, d_scores);
      __syncthreads();
      const auto sees = [&](int row, int c) {
        return first_key + row >= shared.rows[c].sees.x && first_key + row < shared.rows[c].sees.y;
      };
      F::accumulate(d_value, shrink, shared.weights, shared.d_out, sees);
      F::accumulate(d_key, shrink, shared.d_scores, shared.query, sees);
    }
  }
  const auto stored = [&](int key) { return key < a.keys; };
  F::store(d_key, a.d_key, kv_head, first_key, stored, a.head_size, a.scale, a.add_key_value);
  F::store(d_value, a.d_value, kv_head, first_key, stored, a.head_size, 1, a.add_key_value);
}

template <int kHeadSize>
void queue_d_query(const BackwardArguments& a, cudaStream_t stream) {
  const int64_t blocks = ceil_div(a.queries, Fp32<kHeadSize>::kTile) * a.heads;
  launch(d_query_kernel<kHeadSize>, blocks, kFp32Threads, sizeof(SharedBackward<kHeadSize>), stream, a);
}

template <int kHeadSize>
void queue_d_key_value(const BackwardArguments& a, cudaStream_t stream) {
  const int64_t blocks = ceil_div(a.keys, Fp32<kHeadSize>::kTile) * a.kv_heads;
  launch(d_key_value_kernel<kHeadSize>, blocks, kFp32Threads, sizeof(SharedBackward<kHeadSize>), stream, a);
}

}  // namespace

void attention_d_query_fp32(const BackwardArguments& arguments, cudaStream_t stream) {
  if (arguments.head_size <= 64) return queue_d_query<64>(arguments, stream);
  if (arguments.head_size <= 128) return queue_d_query<128>(arguments, stream);
  queue_d_query<256>(arguments, stream);
}

void attention_d_key_value_fp32(const BackwardArguments& arguments, cudaStream_t stream) {
  if (arguments.head_size <= 64) return queue_d_key_value<64>(arguments, stream);
  if (arguments.head_size <= 128) return queue_d_key_value<128>(arguments, stream);
  queue_d_key_value<256>(arguments, stream);
}

}  // namespace farspan::cuda
