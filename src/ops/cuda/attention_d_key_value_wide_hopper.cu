// SPDX-License-Identifier: Apache-2.0
// d_key and d_value in bf16 for Hopper, head sizes of 129 to 256. Gradients of 64 keys fill the registers of two
// warpgroups, so these share the keys of a tile and halve the work: one computes weights and sums d_value, the other
// computes score gradients, for which it gets the weights through shared memory, and sums d_key. They take turns at the
// matrix units, where each queues its sum over the tile of queries at hand and its product with the next one:
//
//   turn      of the weights' group          of the score gradients'
//   t         d_v += p(t-1) d_out; Q(t) K    -
//   t         2^..: p(t), handed over        d_k += ds(t-1) Q; d_out(t) V
//   t + 1     d_v += p(t) d_out; Q(t+1) K    p(t) (.. - delta): ds(t)
//
// Otherwise as attention_d_key_value_hopper.cu: transposed, keys by queries, with a producer warpgroup.
#include <cmath>

#include "base/math.h"
#include "ops/cuda/attention_hopper.cuh"
#include "ops/cuda/attention_kernel_list.h"
#include "ops/cuda/attention_launch.cuh"
#include "ops/cuda/attention_query_rows.cuh"

namespace farspan::cuda {
namespace {

constexpr int kHeadSize = 256;
constexpr int kKeys = kWideBackwardKeys;
static_assert(kKeys == 64);
constexpr int kQueries = kBoundsRows;  // of a tile
constexpr int kStages = 2;
constexpr int kThreads = 3 * 128;
constexpr int kTileBytes = 64 * kHeadSize * 2;

// Named barriers of the consumers, besides kTurn and kAllConsumers.
constexpr int kWeightsFull = 3, kWeightsFree = 4;

struct alignas(1024) Shared {
  unsigned char key[kTileBytes], value[kTileBytes];
  unsigned char query[kStages][kTileBytes], d_out[kStages][kTileBytes];
  float4 weights[8][128];  // a KeyQueryTile, vector by vector of all threads
  QueryRows rows[kStages];
  CopyBarrier key_full;
  CopyBarrier query_full[kStages], query_free[kStages];  // with the rows
  CopyBarrier d_out_full[kStages], d_out_free[kStages];
  unsigned long long not_finite;
};
static_assert(sizeof(Shared) <= 227 * 1024);

struct Maps {
  TensorMap query, d_out, key, value;
};

// Asks the copy engine for queries and output gradients: one thread.
class Copier {
 public:
  __device__ Copier(Shared& shared, const Maps& maps) : shared_(shared), maps_(maps) {}

  __device__ void load_keys(int kv_head, int first_key) {
    barrier_expect(shared_.key_full, 2 * kTileBytes);
    copy_tile<kHeadSize, kKeys>(shared_.key, maps_.key, shared_.key_full, kv_head, first_key);
    copy_tile<kHeadSize, kKeys>(shared_.value, maps_.value, shared_.key_full, kv_head, first_key);
  }

  __device__ void run(QueryWalk walk) {
    for (; !walk.done(); walk.advance(), ring_.advance()) {
      const int s = ring_.stage;
      fill(shared_.query[s], maps_.query, shared_.query_full[s], shared_.query_free[s], walk);
      fill(shared_.d_out[s], maps_.d_out, shared_.d_out_full[s], shared_.d_out_free[s], walk);
    }
    // The rows say that there are no more.
    barrier_wait(shared_.query_free[ring_.stage], ring_.parity ^ 1);
    barrier_arrive(shared_.query_full[ring_.stage]);
    barrier_wait(shared_.d_out_free[ring_.stage], ring_.parity ^ 1);
    barrier_arrive(shared_.d_out_full[ring_.stage]);
    ring_.advance();
  }

 private:
  __device__ void fill(unsigned char* tile, const TensorMap& map, CopyBarrier& full, CopyBarrier& free,
                       const QueryWalk& walk) {
    barrier_wait(free, ring_.parity ^ 1);
    barrier_expect(full, kTileBytes);
    copy_tile<kHeadSize, kQueries>(tile, map, full, walk.head(), walk.first_query());
  }

  Shared& shared_;
  const Maps& maps_;
  Ring<kStages> ring_;
};

// One of the two consumers. kWeights: computes weights from queries and keys, and sums d_value; else score gradients
// from output gradients and values, and d_key.
template <bool kWeights>
class Consumer {
 public:
  __device__ Consumer(Shared& shared, const BackwardArguments& a, int first_key)
      : shared_(shared),
        row_(first_key + fragment_row(static_cast<int>(threadIdx.x) % 128)),
        factor_(a.scale * kLog2E),
        mine_(shared_address(kWeights ? shared.key : shared.value)) {
    if constexpr (!kWeights) {  // the first turn and the room for weights are the other's
      named_barrier_arrive(kTurn, 256);
      named_barrier_arrive(kWeightsFree, 256);
    }
  }

  // careful: queries and output gradients that are not finite are taken out before use, and keys that such a query sees
  // become NaN. any_masked(): some tile had a mask.
  __device__ void run(bool careful) {
    poisoned_[0] = poisoned_[1] = any_masked_ = false;
    sums_.clear();
    barrier_wait(shared_.key_full, 0);
    TileKind kind = await(ring_);
    if (kind != TileKind::end) {
      if (careful && kind == TileKind::masked) clear_queries(ring_);
      begin_product(ring_);
      warpgroup_wait<0>();
      while (true) {
        end_product(ring_);
        const bool masked = kind == TileKind::masked;
        any_masked_ |= masked;
        weigh(masked);
        pack_results<kQueries>(packed_, product_);

        Ring<kStages> next = ring_;
        next.advance();
        if (careful) {  // both, which would wait for each other inside a turn
          kind = await(next);
          if (kind == TileKind::masked) clear_queries(next);
        }
        named_barrier_sync(kTurn + kOrder, 256);
        begin_sum();
        kind = await(next);
        if (kind == TileKind::end) break;
        begin_product(next);
        named_barrier_arrive(kTurn + 1 - kOrder, 256);
        warpgroup_wait<1>();
        end_sum();
        warpgroup_wait<0>();
        ring_ = next;
      }
      named_barrier_arrive(kTurn + 1 - kOrder, 256);
      warpgroup_wait<0>();
      end_sum();
      ring_.advance();
    }
    end_walk();
  }

  __device__ bool any_masked() const { return any_masked_; }
  __device__ bool finite() const { return sums_.probe() == 0; }

  __device__ void store(const BackwardArguments& a, int kv_head) const {
    const float factor = kWeights ? 1 : a.scale;
    const float factors[2] = {poisoned_[0] ? NAN : factor, poisoned_[1] ? NAN : factor};
    const bool stored[2] = {row_ < a.keys, row_ + 8 < a.keys};
    sums_.store(kWeights ? a.d_value : a.d_key, kv_head, row_, stored, factors, a.head_size, a.add_key_value);
  }

 private:
  static constexpr int kOrder = kWeights ? 0 : 1;  // of the turns

  // Waits for a tile's queries and rows.
  __device__ TileKind await(const Ring<kStages>& ring) {
    barrier_wait(shared_.query_full[ring.stage], ring.parity);
    return kind_of(shared_.rows[ring.stage]);
  }
  __device__ void await_d_out(const Ring<kStages>& ring) {
    barrier_wait(shared_.d_out_full[ring.stage], ring.parity);
  }
  __device__ void release(CopyBarrier& free) {
    __syncwarp();  // all lanes have read their rows
    if (threadIdx.x % 32 == 0) barrier_arrive(free);
  }

  // product = K Q^T, or V d_out^T, of a tile.
  __device__ void begin_product(const Ring<kStages>& ring) {
    if constexpr (!kWeights) await_d_out(ring);
    pin(product_);
    warpgroup_fence();
    multiply_heads<kHeadSize, kQueries>(product_, mine_,
                                        shared_address(kWeights ? shared_.query[ring.stage] : shared_.d_out[ring.stage]));
    warpgroup_commit();
  }
  __device__ void end_product(const Ring<kStages>& ring) {
    pin(product_);
    if constexpr (!kWeights) release(shared_.d_out_free[ring.stage]);
  }

  // sums += weights d_out, or score gradients Q, of the current tile.
  __device__ void begin_sum() {
    if constexpr (kWeights) await_d_out(ring_);
    sums_.template multiply_rows<kQueries>(
        packed_, shared_address(kWeights ? shared_.d_out[ring_.stage] : shared_.query[ring_.stage]));
    warpgroup_commit();
  }
  __device__ void end_sum() {
    sums_.pin();
    release(kWeights ? shared_.d_out_free[ring_.stage] : shared_.query_free[ring_.stage]);
  }

  // Leaves the stage that said that there are no more tiles.
  __device__ void end_walk() {
    await_d_out(ring_);
    release(shared_.query_free[ring_.stage]);
    release(shared_.d_out_free[ring_.stage]);
    ring_.advance();
  }

  // product to weights, which the other group gets too; or to score gradients.
  __device__ void weigh(bool masked) {
    const QueryRows& rows = shared_.rows[ring_.stage];
    const int thread = static_cast<int>(threadIdx.x) % 128;
    if constexpr (kWeights) {
      weigh_tile(product_, rows, factor_);
      if (masked) select_seen(product_, rows, row_);
      named_barrier_sync(kWeightsFree, 256);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        shared_.weights[i][thread] = {product_[4 * i], product_[4 * i + 1], product_[4 * i + 2], product_[4 * i + 3]};
      named_barrier_arrive(kWeightsFull, 256);
      release(shared_.query_free[ring_.stage]);
    } else {
      KeyQueryTile weights;
      named_barrier_sync(kWeightsFull, 256);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 four = shared_.weights[i][thread];
        weights[4 * i] = four.x, weights[4 * i + 1] = four.y, weights[4 * i + 2] = four.z, weights[4 * i + 3] = four.w;
      }
      named_barrier_arrive(kWeightsFree, 256);
      differentiate_tile(product_, weights, rows);
      if (masked) select_seen(product_, rows, row_);
    }
  }

  // Both consumers together.
  __device__ void clear_queries(const Ring<kStages>& ring) {
    await_d_out(ring);
    uint64_t spoilt = clear_together<2>(shared_.query[ring.stage], kHeadSize, &shared_.not_finite) |
                      clear_together<2>(shared_.d_out[ring.stage], kHeadSize, &shared_.not_finite);
    for (int i = 0; spoilt != 0; ++i, spoilt >>= 1)
      for (int half = 0; half < 2; ++half) {
        const int2 sees = shared_.rows[ring.stage].sees[i];
        poisoned_[half] |= (spoilt & 1) != 0 && row_ + 8 * half >= sees.x && row_ + 8 * half < sees.y;
      }
  }

  Shared& shared_;
  int row_;  // this thread's first key; the second is 8 further
  float factor_;
  uint32_t mine_;     // keys or values
  bool poisoned_[2];  // a query that sees the key, or its output gradient, is not finite
  bool any_masked_;
  Ring<kStages> ring_;
  KeyQueryTile product_;
  uint32_t packed_[kQueries / 16][4];
  RowSums<kHeadSize> sums_;
};

template <bool kWeights>
__device__ void consume(Shared& shared, const BackwardArguments& a, int kv_head, int first_key) {
  Consumer<kWeights> consumer(shared, a, first_key);
  consumer.run(false);
  if (__syncthreads_or(consumer.any_masked() && !consumer.finite())) {
    consumer.run(true);
    __syncthreads_or(0);
  }
  consumer.store(a, kv_head);
}

__global__ void __launch_bounds__(kThreads, 1)
    d_key_value_wide_kernel(const __grid_constant__ BackwardArguments a, const __grid_constant__ Maps maps) {
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  if (threadIdx.x == 0) {
    barrier_init(shared.key_full, 1);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared.query_full[s], 1 + 2);  // the copier and the row readers' warps
      barrier_init(shared.d_out_full[s], 1);
      barrier_init(shared.query_free[s], 4 * 2);  // the consumers' warps
      barrier_init(shared.d_out_free[s], 4 * 2);
    }
    barrier_init_fence();
  }
  __syncthreads();

  let_next_start();
  const auto [tile, kv_head] = a.key_order[blockIdx.x];
  const int first_key = tile * kKeys;
  if (a.add_key_value && QueryWalk(a, kv_head, first_key, kKeys).done()) return;  // nothing to add

  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    give_back_registers<kProducerRegisters>();
    const QueryWalk walk(a, kv_head, first_key, kKeys);
    Copier copier(shared, maps);
    RowReader<kStages> reader(shared.rows, shared.query_full, shared.query_free, a);
    if (threadIdx.x == 0) copier.load_keys(kv_head, first_key);
    bring_queries(copier, reader, walk);
  } else {
    take_registers<kConsumerRegisters>();
    if (group == 1)
      consume<true>(shared, a, kv_head, first_key);
    else
      consume<false>(shared, a, kv_head, first_key);
  }
}

}  // namespace

void attention_d_key_value_wide_hopper(const BackwardArguments& a, cudaStream_t stream) {
  const Maps maps{heads_map(a.query, a.queries, a.heads, a.head_size, kQueries),
                  heads_map(a.d_out, a.queries, a.heads, a.head_size, kQueries),
                  heads_map(a.key, a.keys, a.kv_heads, a.head_size, kKeys),
                  heads_map(a.value, a.keys, a.kv_heads, a.head_size, kKeys)};
  // Not early: d_query starts beside it and waits for nothing that came before.
  launch(d_key_value_wide_kernel, ceil_div(a.keys, kKeys) * a.kv_heads, kThreads, sizeof(Shared), stream, a, maps);
}

}  // namespace farspan::cuda
