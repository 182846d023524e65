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
#include "ops/cuda/attention_query_rows.cuh"

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
    d_key_.clear();
    d_value_.clear();
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
        weigh_tile(scores_, rows(), factor_);
        if (masked) select_seen(scores_, rows(), row_);
        pack_results<P::kQueries>(weights_, scores_);
        warpgroup_wait<0>();
        pin(d_weights_);
        multiply_d_out();
        differentiate_tile(d_weights_, scores_, rows());
        if (masked) select_seen(d_weights_, rows(), row_);
        pack_results<P::kQueries>(d_scores_, d_weights_);
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

  __device__ bool finite() const { return d_key_.probe() + d_value_.probe() == 0; }

  __device__ void store(const BackwardArguments& a, int kv_head) const {
    const float of_key[2] = {poisoned_[0] ? NAN : a.scale, poisoned_[1] ? NAN : a.scale};
    const float of_value[2] = {poisoned_[0] ? NAN : 1.0f, poisoned_[1] ? NAN : 1.0f};
    const bool stored[2] = {row_ < a.keys, row_ + 8 < a.keys};
    d_key_.store(a.d_key, kv_head, row_, stored, of_key, a.head_size, a.add_key_value);
    d_value_.store(a.d_value, kv_head, row_, stored, of_value, a.head_size, a.add_key_value);
  }

 private:
  // Waits for a tile's queries.
  __device__ TileKind await(const Ring<P::kStages>& ring, bool careful) {
    barrier_wait(shared_.query_full[ring.stage], ring.parity);
    const TileKind kind = kind_of(shared_.rows[ring.stage]);
    if (careful && kind == TileKind::masked) clear_queries(ring);
    return kind;
  }
  __device__ void end_gradients() {
    d_value_.pin();
    d_key_.pin();
    release();
  }
  __device__ void release() {
    __syncwarp();  // all lanes have read their rows
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_.free[ring_.stage]);
    ring_.advance();
  }

  __device__ const QueryRows& rows() const { return shared_.rows[ring_.stage]; }

  // scores = K Q^T of a tile.
  __device__ void begin_scores(const Ring<P::kStages>& ring) {
    begin(scores_, key_, shared_address(shared_.query[ring.stage]));
  }
  // d_weights = V d_out^T of the current tile.
  __device__ void begin_d_weights() {
    barrier_wait(shared_.d_out_full[ring_.stage], ring_.parity);
    begin(d_weights_, value_, shared_address(shared_.d_out[ring_.stage]));
  }
  __device__ static void begin(KeyQueryTile& c, uint32_t a, uint32_t b) {
    pin(c);
    warpgroup_fence();
    multiply_heads<P::kHeadSize, P::kQueries>(c, a, b);
    warpgroup_commit();
  }
  // d_value += weights d_out
  __device__ void multiply_d_out() {
    d_value_.template multiply_rows<P::kQueries>(weights_, shared_address(shared_.d_out[ring_.stage]));
    warpgroup_commit();
  }
  // d_key += d_scores Q
  __device__ void multiply_queries() {
    d_key_.template multiply_rows<P::kQueries>(d_scores_, shared_address(shared_.query[ring_.stage]));
    warpgroup_commit();
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
  KeyQueryTile scores_, d_weights_;  // later weights, and score gradients
  uint32_t weights_[P::kQueries / 16][4], d_scores_[P::kQueries / 16][4];
  RowSums<P::kHeadSize> d_key_, d_value_;
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
    RowReader<P::kStages> reader(shared.rows, shared.query_full, shared.free, a);
    if (threadIdx.x == 0) copier.load_keys(kv_head, first_key);
    bring_queries(copier, reader, walk);
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
