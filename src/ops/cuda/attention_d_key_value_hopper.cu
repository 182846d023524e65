// SPDX-License-Identifier: Apache-2.0
// d_key and d_value in bf16 for Hopper, head sizes up to 128. As attention_d_key_value_mma.cu: a block of threads owns
// the keys of a tile, the queries of all the group's heads that see any of them pass by in tiles, and everything is
// computed transposed, keys by queries. Here a producer warpgroup brings the queries, by the copy engine, and what else
// is known of them, by two of its warps; each of two consumers owns 64 keys.
//
//   d_v_j = sum_i p_ij d_out_i;   ds_ij = p_ij (<d_out_i, v_j> - delta_i);   d_k_j = scale sum_i ds_ij q_i
#include <cmath>

#include "base/math.h"
#include "ops/cuda/attention_hopper.cuh"
#include "ops/cuda/attention_kernel_list.h"
#include "ops/cuda/attention_launch.cuh"
#include "ops/cuda/attention_query_walk.cuh"

namespace farspan::cuda {
namespace {

template <int kHeadSize_>
struct Plan {
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kConsumers = 2;
  static constexpr int kKeys = kBackwardTileRows;
  static_assert(kKeys == 64 * kConsumers);
  static constexpr int kQueries = kBoundsRows;  // of a tile
  static constexpr int kStages = 3;
  static constexpr int kThreads = 128 * (kConsumers + 1);
};

enum class TileKind : int { plain, masked, end };  // end: there are no more

// Of the queries of a tile.
struct QueryRows {
  TileKind kind;
  alignas(8) float lse[kBoundsRows];  // to base 2
  float delta[kBoundsRows];
  int2 sees[kBoundsRows];
};

template <typename P>
struct alignas(1024) Shared {
  unsigned char key[P::kConsumers][64 * P::kHeadSize * 2];
  unsigned char value[P::kConsumers][64 * P::kHeadSize * 2];
  unsigned char query[P::kStages][P::kQueries * P::kHeadSize * 2];
  unsigned char d_out[P::kStages][P::kQueries * P::kHeadSize * 2];
  QueryRows rows[P::kStages];
  CopyBarrier key_full;
  CopyBarrier query_full[P::kStages], d_out_full[P::kStages];
  CopyBarrier free[P::kStages];
  unsigned long long not_finite;
};

template <typename P>
struct Maps {
  TensorMap query, d_out, key, value;
};

// Asks the copy engine for queries and output gradients: one thread.
template <typename P>
class Copier {
 public:
  __device__ Copier(Shared<P>& shared, const Maps<P>& maps) : shared_(shared), maps_(maps) {}

  __device__ void load_keys(int kv_head, int first_key) {
    barrier_expect(shared_.key_full, sizeof(shared_.key) + sizeof(shared_.value));
    for (int c = 0; c < P::kConsumers; ++c) {
      copy_tile<P::kHeadSize, 64>(shared_.key[c], maps_.key, shared_.key_full, kv_head, first_key + 64 * c);
      copy_tile<P::kHeadSize, 64>(shared_.value[c], maps_.value, shared_.key_full, kv_head, first_key + 64 * c);
    }
  }

  __device__ void run(QueryWalk walk) {
    constexpr int kBytes = P::kQueries * P::kHeadSize * 2;
    for (; !walk.done(); walk.advance(), ring_.advance()) {
      const int s = ring_.stage;
      barrier_wait(shared_.free[s], ring_.parity ^ 1);
      barrier_expect(shared_.query_full[s], kBytes);
      copy_tile<P::kHeadSize, P::kQueries>(shared_.query[s], maps_.query, shared_.query_full[s], walk.head(),
                                           walk.first_query());
      barrier_expect(shared_.d_out_full[s], kBytes);
      copy_tile<P::kHeadSize, P::kQueries>(shared_.d_out[s], maps_.d_out, shared_.d_out_full[s], walk.head(),
                                           walk.first_query());
    }
    barrier_wait(shared_.free[ring_.stage], ring_.parity ^ 1);
    barrier_arrive(shared_.query_full[ring_.stage]);
    barrier_arrive(shared_.d_out_full[ring_.stage]);
    ring_.advance();
  }

 private:
  Shared<P>& shared_;
  const Maps<P>& maps_;
  Ring<P::kStages> ring_;
};

// Brings the rows' lse, delta and bounds: two warps, one thread a row.
template <typename P>
class RowReader {
 public:
  __device__ RowReader(Shared<P>& shared, const BackwardArguments& a)
      : shared_(shared), a_(a), row_(static_cast<int>(threadIdx.x) - 32) {}

  __device__ void run(QueryWalk walk) {
    for (; !walk.done(); walk.advance()) {
      const int query = walk.first_query() + row_;
      const bool present = query < a_.queries;
      const float lse = present ? finite_lse(a_.lse.data[walk.head() * a_.lse.head_stride + query]) * kLog2E : 0;
      const float delta = present ? a_.delta.data[walk.head() * a_.delta.head_stride + query] : 0;
      const int2 sees = present ? a_.bounds.rows[query] : int2{0, 0};
      barrier_wait(shared_.free[ring_.stage], ring_.parity ^ 1);
      QueryRows& rows = shared_.rows[ring_.stage];
      rows.lse[row_] = lse;
      rows.delta[row_] = delta;
      rows.sees[row_] = sees;
      finish(walk.masked() ? TileKind::masked : TileKind::plain);
    }
    barrier_wait(shared_.free[ring_.stage], ring_.parity ^ 1);
    finish(TileKind::end);
  }

 private:
  __device__ void finish(TileKind kind) {
    if (row_ == 0) shared_.rows[ring_.stage].kind = kind;
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_.query_full[ring_.stage]);
    ring_.advance();
  }

  Shared<P>& shared_;
  const BackwardArguments& a_;
  int row_;
  Ring<P::kStages> ring_;
};

template <typename P>
class Consumer {
 public:
  __device__ Consumer(Shared<P>& shared, const BackwardArguments& a, int first_key)
      : shared_(shared),
        group_(static_cast<int>(threadIdx.x) / 128 - 1),
        row_(first_key + 64 * group_ + fragment_row(static_cast<int>(threadIdx.x) % 128)),
        factor_(a.scale * kLog2E),
        key_(shared_address(shared.key[group_])),
        value_(shared_address(shared.value[group_])) {}

  // careful: queries and output gradients that are not finite are taken out before use, and keys that such a query sees
  // become NaN. any_masked_: some tile had a mask.
  __device__ void run(bool careful) {
    poisoned_[0] = poisoned_[1] = any_masked_ = false;
#pragma unroll
    for (int i = 0; i < P::kHeadSize / 2; ++i) d_key_[i] = d_value_[i] = 0;
    barrier_wait(shared_.key_full, 0);
    TileKind kind = await(ring_, careful);
    if (kind != TileKind::end) {
      begin_scores(ring_);
      while (true) {
        const bool masked = kind == TileKind::masked;
        any_masked_ |= masked;
        begin_d_weights();
        warpgroup_wait<1>();
        pin(scores_);
        weigh(masked);
        pack(weights_, scores_);
        warpgroup_wait<0>();
        pin(d_weights_);
        multiply_d_out();
        differentiate(masked);
        pack(d_scores_, d_weights_);
        multiply_queries();

        Ring<P::kStages> next = ring_;
        next.advance();
        kind = await(next, careful);
        if (kind == TileKind::end) break;
        begin_scores(next);
        warpgroup_wait<1>();
        end_gradients();
      }
      warpgroup_wait<0>();
      end_gradients();
    }
    release();
  }

  __device__ bool any_masked() const { return any_masked_; }

  __device__ bool finite() const {
    float probe = 0;
#pragma unroll
    for (int i = 0; i < P::kHeadSize / 2; ++i) {
      probe = fmaf(d_key_[i], 0.0f, probe);
      probe = fmaf(d_value_[i], 0.0f, probe);
    }
    return probe == 0;
  }

  __device__ void store(const BackwardArguments& a, int kv_head) const {
    const float of_key[2] = {poisoned_[0] ? NAN : a.scale, poisoned_[1] ? NAN : a.scale};
    const float of_value[2] = {poisoned_[0] ? NAN : 1.0f, poisoned_[1] ? NAN : 1.0f};
    const bool stored[2] = {row_ < a.keys, row_ + 8 < a.keys};
    store_fragment<P::kHeadSize>(a.d_key, kv_head, row_, stored, d_key_, of_key, a.head_size, a.add_key_value);
    store_fragment<P::kHeadSize>(a.d_value, kv_head, row_, stored, d_value_, of_value, a.head_size, a.add_key_value);
  }

 private:
  // Waits for a tile's queries.
  __device__ TileKind await(const Ring<P::kStages>& ring, bool careful) {
    barrier_wait(shared_.query_full[ring.stage], ring.parity);
    // The compiler cannot know that all threads read the same, and would wait for every product in turn.
    const TileKind kind =
        static_cast<TileKind>(__shfl_sync(0xffffffffu, static_cast<int>(shared_.rows[ring.stage].kind), 0));
    if (careful && kind == TileKind::masked) clear_queries(ring);
    return kind;
  }
  __device__ void end_gradients() {
    pin(d_value_);
    pin(d_key_);
    release();
  }
  __device__ void release() {
    __syncwarp();  // all lanes have read their rows
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_.free[ring_.stage]);
    ring_.advance();
  }

  // scores = K Q^T of a tile.
  __device__ void begin_scores(const Ring<P::kStages>& ring) {
    multiply_heads(scores_, key_, shared_address(shared_.query[ring.stage]));
  }
  // d_weights = V d_out^T of the current tile.
  __device__ void begin_d_weights() {
    barrier_wait(shared_.d_out_full[ring_.stage], ring_.parity);
    multiply_heads(d_weights_, value_, shared_address(shared_.d_out[ring_.stage]));
  }
  __device__ void multiply_heads(float (&c)[P::kQueries / 2], uint32_t a, uint32_t b) {
    pin(c);
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < P::kHeadSize / 16; ++k)
      warpgroup_multiply<Major::summed>(c, operand<Major::summed>(a + summed_offset<64>(k)),
                                        operand<Major::summed>(b + summed_offset<P::kQueries>(k)), k > 0);
    warpgroup_commit();
  }

  // d_value += weights d_out
  __device__ void multiply_d_out() { multiply_rows(d_value_, weights_, shared_address(shared_.d_out[ring_.stage])); }
  // d_key += d_scores Q
  __device__ void multiply_queries() { multiply_rows(d_key_, d_scores_, shared_address(shared_.query[ring_.stage])); }
  __device__ void multiply_rows(float (&c)[P::kHeadSize / 2], const uint32_t (&a)[P::kQueries / 16][4], uint32_t b) {
    pin(c);
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < P::kQueries / 16; ++k)
      warpgroup_multiply<Major::kept>(
          c, a[k], operand<Major::kept>(b + kept_offset<P::kQueries>(k), P::kQueries * 128), true);
    warpgroup_commit();
  }
  // The first of the two neighbouring queries whose pairs are elements i and i + 1.
  __device__ static int query_of(int i) { return fragment_column(static_cast<int>(threadIdx.x), i); }

  __device__ void weigh(bool masked) {
    const QueryRows& rows = shared_.rows[ring_.stage];
#pragma unroll
    for (int i = 0; i < P::kQueries / 2; i += 4) {
      const float2 lse = *reinterpret_cast<const float2*>(&rows.lse[query_of(i)]);
#pragma unroll
      for (int c = 0; c < 4; ++c)
        scores_[i + c] = exp2_approximate(fmaf(scores_[i + c], factor_, c % 2 == 0 ? -lse.x : -lse.y));
    }
    if (masked) select(scores_, rows);
  }

  __device__ void differentiate(bool masked) {
    const QueryRows& rows = shared_.rows[ring_.stage];
#pragma unroll
    for (int i = 0; i < P::kQueries / 2; i += 4) {
      const float2 delta = *reinterpret_cast<const float2*>(&rows.delta[query_of(i)]);
#pragma unroll
      for (int c = 0; c < 4; ++c)
        d_weights_[i + c] = scores_[i + c] * (d_weights_[i + c] - (c % 2 == 0 ? delta.x : delta.y));
    }
    if (masked) select(d_weights_, rows);
  }

  // Zero for the pairs that are masked.
  __device__ void select(float (&x)[P::kQueries / 2], const QueryRows& rows) const {
#pragma unroll
    for (int i = 0; i < P::kQueries / 2; i += 4)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int2 sees = rows.sees[query_of(i) + c % 2];
        const int key = row_ + c / 2 * 8;
        if (key < sees.x || key >= sees.y) x[i + c] = 0;
      }
  }

  __device__ static void pack(uint32_t (&packed)[P::kQueries / 16][4], const float (&x)[P::kQueries / 2]) {
#pragma unroll
    for (int k = 0; k < P::kQueries / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) packed[k][i] = pack_bf16(x[8 * k + 2 * i], x[8 * k + 2 * i + 1]);
  }

  // Both consumers together.
  __device__ void clear_queries(const Ring<P::kStages>& ring) {
    barrier_wait(shared_.d_out_full[ring.stage], ring.parity);
    uint64_t spoilt =
        clear_together<P::kConsumers>(shared_.query[ring.stage], P::kHeadSize, &shared_.not_finite) |
        clear_together<P::kConsumers>(shared_.d_out[ring.stage], P::kHeadSize, &shared_.not_finite);
    for (int i = 0; spoilt != 0; ++i, spoilt >>= 1)
      for (int half = 0; half < 2; ++half) {
        const int2 sees = shared_.rows[ring.stage].sees[i];
        poisoned_[half] |= (spoilt & 1) != 0 && row_ + 8 * half >= sees.x && row_ + 8 * half < sees.y;
      }
  }

  Shared<P>& shared_;
  int group_;  // this consumer's number
  int row_;    // this thread's first key; the second is 8 further
  float factor_;
  uint32_t key_, value_;
  bool poisoned_[2];  // a query that sees the key, or its output gradient, is not finite
  bool any_masked_;
  Ring<P::kStages> ring_;
  float scores_[P::kQueries / 2], d_weights_[P::kQueries / 2];  // later weights, and score gradients
  uint32_t weights_[P::kQueries / 16][4], d_scores_[P::kQueries / 16][4];
  float d_key_[P::kHeadSize / 2], d_value_[P::kHeadSize / 2];
};

template <typename P>
__global__ void __launch_bounds__(P::kThreads, 1)
    d_key_value_kernel(const __grid_constant__ BackwardArguments a, const __grid_constant__ Maps<P> maps) {
  Shared<P>& shared = *reinterpret_cast<Shared<P>*>(dynamic_shared());
  if (threadIdx.x == 0) {
    barrier_init(shared.key_full, 1);
    for (int s = 0; s < P::kStages; ++s) {
      barrier_init(shared.query_full[s], 1 + 2);  // the copier and the row readers' warps
      barrier_init(shared.d_out_full[s], 1);
      barrier_init(shared.free[s], 4 * P::kConsumers);  // the consumers' warps
    }
    barrier_init_fence();
  }
  __syncthreads();

  let_next_start();
  const auto [tile, kv_head] = a.key_order[blockIdx.x];
  const int first_key = tile * P::kKeys;
  if (a.add_key_value && QueryWalk(a, kv_head, first_key, P::kKeys).done()) return;  // nothing to add

  if (threadIdx.x < 128) {
    give_back_registers<kProducerRegisters>();
    const QueryWalk walk(a, kv_head, first_key, P::kKeys);
    Copier<P> copier(shared, maps);
    RowReader<P> reader(shared, a);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x == 0) copier.load_keys(kv_head, first_key);
    do {
      if (threadIdx.x == 0) copier.run(walk);
      if (warp == 1 || warp == 2) reader.run(walk);
      __syncwarp();
    } while (__syncthreads_or(0));
  } else {
    take_registers<kConsumerRegisters>();
    Consumer<P> consumer(shared, a, first_key);
    consumer.run(false);
    if (__syncthreads_or(consumer.any_masked() && !consumer.finite())) {
      consumer.run(true);
      __syncthreads_or(0);
    }
    consumer.store(a, kv_head);
  }
}

template <int kHeadSize>
void queue(const BackwardArguments& a, cudaStream_t stream) {
  using P = Plan<kHeadSize>;
  const Maps<P> maps{heads_map(a.query, a.queries, a.heads, a.head_size, P::kQueries),
                     heads_map(a.d_out, a.queries, a.heads, a.head_size, P::kQueries),
                     heads_map(a.key, a.keys, a.kv_heads, a.head_size, 64),
                     heads_map(a.value, a.keys, a.kv_heads, a.head_size, 64)};
  // Not early: d_query starts beside it and waits for nothing that came before.
  launch(d_key_value_kernel<P>, ceil_div(a.keys, P::kKeys) * a.kv_heads, P::kThreads, sizeof(Shared<P>), stream, a,
         maps);
}

}  // namespace

void attention_d_key_value_hopper(const BackwardArguments& arguments, cudaStream_t stream) {
  if (arguments.head_size <= 64) return queue<64>(arguments, stream);
  queue<128>(arguments, stream);
}

}  // namespace farspan::cuda
