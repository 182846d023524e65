// SPDX-License-Identifier: Apache-2.0
// Forward attention in fp32 throughout: for results as exact as the CPU's, not for speed.
#include "base/math.h"
#include "ops/cuda/attention_fp32.cuh"
#include "ops/cuda/attention_kernel_list.h"
#include "ops/cuda/attention_launch.cuh"
#include "ops/cuda/attention_state.cuh"

namespace farspan::cuda {
namespace {

template <int kHeadSize>
struct SharedForward {
  typename Fp32<kHeadSize>::Tokens query, key, value;
  typename Fp32<kHeadSize>::Pairs weights;
  int2 rows[Fp32<kHeadSize>::kTile];
};

template <int kHeadSize>
__global__ void __launch_bounds__(kFp32Threads) forward_kernel(const __grid_constant__ ForwardArguments a) {
  using F = Fp32<kHeadSize>;
  constexpr int kTile = F::kTile, kRows = F::kRows;
  SharedForward<kHeadSize>& shared = *reinterpret_cast<SharedForward<kHeadSize>*>(dynamic_shared());
  const int x = F::x(), y = F::y();
  const int tiles = (a.queries + kTile - 1) / kTile;
  const int head = static_cast<int>(blockIdx.x) / tiles;
  const int first_query = (tiles - 1 - static_cast<int>(blockIdx.x) % tiles) * kTile;
  const int kv_head = head / a.group;
  const TileBounds bounds = bounds_of(a, first_query, kTile);

  F::load(shared.query, a.query, head, first_query, a.queries, a.head_size);
  for (int i = static_cast<int>(threadIdx.x); i < kTile; i += kFp32Threads)
    shared.rows[i] = first_query + i < a.queries ? a.bounds.rows[first_query + i] : int2{0, 0};

  typename F::Results out{};
  float maximum[kRows], sum[kRows], shrink[kRows];
  for (int r = 0; r < kRows; ++r) {
    maximum[r] = -INFINITY;
    sum[r] = 0;
  }
  HeadDraws draws(a.dropout, head);
  for (int key = bounds.first / kTile * kTile; key < bounds.last; key += kTile) {
    __syncthreads();
    F::load(shared.key, a.key, kv_head, key, a.keys, a.head_size);
    F::load(shared.value, a.value, kv_head, key, a.keys, a.head_size);
    __syncthreads();
    typename F::Scores scores;
    F::multiply(scores, shared.query, shared.key);
    for (int r = 0; r < kRows; ++r) {
      const int2 sees = shared.rows[y + 16 * r];
      float larger = maximum[r];
      for (int c = 0; c < kRows; ++c) {
        const int j = key + x + 16 * c;
        scores[r][c] = j >= sees.x && j < sees.y ? scores[r][c] * a.scale : -INFINITY;
        larger = fmaxf(larger, scores[r][c]);
      }
      larger = row_max(larger);
      const float base = larger == -INFINITY ? 0 : larger;  // nothing seen yet: all weights are exp(-inf)
      float added = 0;
      for (int c = 0; c < kRows; ++c) {
        scores[r][c] = expf(scores[r][c] - base);
        added += scores[r][c];
        if (a.dropout.threshold > 0 && !draws.keeps(first_query + y + 16 * r, key + x + 16 * c)) scores[r][c] = 0;
      }
      shrink[r] = expf(maximum[r] - base);
      sum[r] = sum[r] * shrink[r] + row_sum(added);
      maximum[r] = larger;
    }
    F::store(shared.weights, scores);
    __syncthreads();
    F::accumulate(out, shrink, shared.weights, shared.value, [&](int row, int c) {
      return key + c >= shared.rows[row].x && key + c < shared.rows[row].y;
    });
  }

  for (int r = 0; r < kRows; ++r) {
    StateUpdate update(a, head, first_query + y + 16 * r, maximum[r], sum[r]);
    __syncwarp();  // the row's threads have read its lse
    if (x == 0) update.store_lse();
    for (int v = 0; v < F::kVectors; ++v) {
      const int column = 4 * x + 64 * v;
      update.store_out(column, out.of[r][v].x, out.of[r][v].y, update.before(column));
      update.store_out(column + 2, out.of[r][v].z, out.of[r][v].w, update.before(column + 2));
    }
  }
}

template <int kHeadSize>
void queue(const ForwardArguments& a, cudaStream_t stream) {
  const int64_t blocks = ceil_div(a.queries, Fp32<kHeadSize>::kTile) * a.heads;
  launch(forward_kernel<kHeadSize>, blocks, kFp32Threads, sizeof(SharedForward<kHeadSize>), stream, a);
}

}  // namespace

void attention_forward_fp32(const ForwardArguments& arguments, cudaStream_t stream) {
  if (arguments.head_size <= 64) return queue<64>(arguments, stream);
  if (arguments.head_size <= 128) return queue<128>(arguments, stream);
  queue<256>(arguments, stream);
}

}  // namespace farspan::cuda
