// SPDX-License-Identifier: Apache-2.0
// d_query in bf16 for Hopper. Built as attention_forward_hopper.cu: a producer warpgroup, and consumers of 64 queries
// each that take turns at the matrix units. A consumer keeps its queries and output gradients in registers, as operands,
// where the head is narrow enough, and has the scores of the next tile of keys computed while the score gradients of
// this one are multiplied with its keys.
//
//   ds_ij = p_ij (<d_out_i, v_j> - delta_i);   d_q_i = scale sum_j ds_ij k_j
#include <cmath>

#include "base/math.h"
#include "ops/cuda/attention_hopper.cuh"
#include "ops/cuda/attention_kernel_list.h"
#include "ops/cuda/attention_launch.cuh"

namespace farspan::cuda {
namespace {

template <int kHeadSize_>
struct Plan {
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kConsumers = 2;
  static constexpr int kQueries = kBackwardTileRows;
  static_assert(kQueries == 64 * kConsumers);
  static constexpr int kKeys = 64;  // of a tile
  // Heads above 128: queries and output gradients stay in shared memory, where the rest is room for two tiles of keys
  // and one of values. Their products come in the order in which that frees these.
  static constexpr bool kWide = kHeadSize > 128;
  static constexpr int kKeyStages = kWide ? 2 : 4, kValueStages = kWide ? 1 : 4;
  static constexpr int kThreads = 128 * (kConsumers + 1);
};

template <typename P>
struct alignas(1024) Shared {
  unsigned char query[P::kConsumers][64 * P::kHeadSize * 2];
  unsigned char d_out[P::kConsumers][64 * P::kHeadSize * 2];
  unsigned char key[P::kKeyStages][P::kKeys * P::kHeadSize * 2];
  unsigned char value[P::kValueStages][P::kKeys * P::kHeadSize * 2];
  CopyBarrier query_full;
  CopyBarrier key_full[P::kKeyStages], key_free[P::kKeyStages];
  CopyBarrier value_full[P::kValueStages], value_free[P::kValueStages];
  unsigned long long not_finite;
};

template <typename P>
struct Maps {
  TensorMap query, d_out, key, value;
};

template <typename P>
class Producer {
 public:
  __device__ Producer(Shared<P>& shared, const Maps<P>& maps, int kv_head)
      : shared_(shared), maps_(maps), kv_head_(kv_head) {}

  __device__ void load_queries(int head, int first_query) {
    barrier_expect(shared_.query_full, sizeof(shared_.query) + sizeof(shared_.d_out));
    for (int c = 0; c < P::kConsumers; ++c) {
      copy_tile<P::kHeadSize, 64>(shared_.query[c], maps_.query, shared_.query_full, head, first_query + 64 * c);
      copy_tile<P::kHeadSize, 64>(shared_.d_out[c], maps_.d_out, shared_.query_full, head, first_query + 64 * c);
    }
  }

  __device__ void run(const KeyTiles& tiles) {
    for (int key = tiles.first; key < tiles.end; key += P::kKeys) {
      fill(shared_.key, maps_.key, shared_.key_full, shared_.key_free, keys_, key);
      fill(shared_.value, maps_.value, shared_.value_full, shared_.value_free, values_, key);
    }
  }

 private:
  template <int kStages, int kBytes>
  __device__ void fill(unsigned char (&tiles)[kStages][kBytes], const TensorMap& map, CopyBarrier (&full)[kStages],
                       CopyBarrier (&free)[kStages], Ring<kStages>& ring, int key) {
    const int s = ring.stage;
    barrier_wait(free[s], ring.parity ^ 1);
    barrier_expect(full[s], kBytes);
    copy_tile<P::kHeadSize, P::kKeys>(tiles[s], map, full[s], kv_head_, key);
    ring.advance();
  }

  Shared<P>& shared_;
  const Maps<P>& maps_;
  int kv_head_;
  Ring<P::kKeyStages> keys_;
  Ring<P::kValueStages> values_;
};

template <typename P>
class Consumer {
 public:
  __device__ Consumer(Shared<P>& shared, const BackwardArguments& a, int head, int first_query)
      : shared_(shared),
        group_(static_cast<int>(threadIdx.x) / 128 - 1),
        row_(first_query + 64 * group_ + fragment_row(static_cast<int>(threadIdx.x) % 128)),
        factor_(a.scale * kLog2E) {
    for (int half = 0; half < 2; ++half) {
      const int query = row_ + 8 * half;
      const bool present = query < a.queries;
      sees_[half] = present ? a.bounds.rows[query] : int2{0, 0};
      lse_[half] = present ? finite_lse(a.lse.data[head * a.lse.head_stride + query]) * kLog2E : 0;
      delta_[half] = present ? a.delta.data[head * a.delta.head_stride + query] : 0;
    }
    if (group_ == P::kConsumers - 1) named_barrier_arrive(kTurn, 256);  // the first turn is consumer 0's
  }

  __device__ void load_queries() {
    barrier_wait(shared_.query_full, 0);
    if constexpr (P::kWide) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
#pragma unroll
    for (int k = 0; k < P::kHeadSize / 16; ++k) {
      // Tiles of 64 columns, each with the layout that Tile<64> has.
      const uint32_t at = static_cast<uint32_t>(k / 4 * 64 * 128) + stacked_offset<64>(row, k % 4 * 2, lane);
      load_matrices(query_[k], shared_address(shared_.query[group_]) + at);
      load_matrices(d_out_[k], shared_address(shared_.d_out[group_]) + at);
    }
  }

  // careful: keys that are not finite are taken out before use, and rows that see one become NaN.
  __device__ void run(const KeyTiles& tiles, bool careful) {
    poisoned_[0] = poisoned_[1] = false;
    d_query_.clear();
    if (!tiles.any()) return;

    if (careful && tiles.masked(tiles.first)) clear_keys(tiles.first);
    begin_scores();
    warpgroup_wait<0>();
    end_scores();
    differentiate(tiles, tiles.first);
    pack();
    for (int key = tiles.first + P::kKeys; key < tiles.end; key += P::kKeys) {
      if (careful && tiles.masked(key)) clear_keys(key);
      named_barrier_sync(kTurn + group_, 256);
      if constexpr (P::kWide) multiply_keys();
      begin_scores();
      if constexpr (!P::kWide) multiply_keys();
      named_barrier_arrive(kTurn + (group_ + 1) % P::kConsumers, 256);
      warpgroup_wait<1>();
      if constexpr (P::kWide) {
        end_keys();
        warpgroup_wait<0>();
      }
      end_scores();
      differentiate(tiles, key);
      if constexpr (!P::kWide) {
        warpgroup_wait<0>();
        end_keys();
      }
      pack();
    }
    multiply_keys();
    warpgroup_wait<0>();
    end_keys();
  }

  __device__ bool finite() const { return d_query_.probe() == 0; }

  __device__ void store(const BackwardArguments& a, int head) const {
    const float factors[2] = {poisoned_[0] ? NAN : a.scale, poisoned_[1] ? NAN : a.scale};
    bool stored[2];
    for (int half = 0; half < 2; ++half) stored[half] = row_ + 8 * half < a.queries && !keeps_blind(a, row_ + 8 * half);
    d_query_.store(a.d_query, head, row_, stored, factors, a.head_size, a.add_query);
  }

 private:
  using Operand = uint32_t[P::kHeadSize / 16][4];

  // scores = Q K^T and d_weights = d_out V^T of the rings' current tiles.
  __device__ void begin_scores() {
    barrier_wait(shared_.key_full[keys_.stage], keys_.parity);
    pin(scores_);
    pin(d_weights_);
    warpgroup_fence();
    multiply(scores_, query_, shared_.query[group_], shared_.key[keys_.stage]);
    barrier_wait(shared_.value_full[values_.stage], values_.parity);
    warpgroup_fence();
    multiply(d_weights_, d_out_, shared_.d_out[group_], shared_.value[values_.stage]);
    warpgroup_commit();
  }
  __device__ static void multiply(float (&c)[P::kKeys / 2], const Operand& loaded, const unsigned char* rows,
                                  const unsigned char* tile) {
    if constexpr (P::kWide)
      multiply_heads<P::kHeadSize, P::kKeys>(c, shared_address(rows), shared_address(tile));
    else
      multiply_heads<P::kHeadSize, P::kKeys>(c, loaded, shared_address(tile));
  }
  __device__ void end_scores() {
    pin(scores_);
    pin(d_weights_);
    release(shared_.value_free[values_.stage]);
    keys_.advance();
    values_.advance();
  }

  // d_query += d_scores K of the tile before the ring's current one.
  __device__ void multiply_keys() {
    d_query_.template multiply_rows<P::kKeys>(d_scores_, shared_address(shared_.key[previous_]));
    warpgroup_commit();
  }
  __device__ void end_keys() {
    d_query_.pin();
    release(shared_.key_free[previous_]);
    previous_ = previous_ + 1 == P::kKeyStages ? 0 : previous_ + 1;
  }

  __device__ void release(CopyBarrier& free) {
    if (threadIdx.x % 32 == 0) barrier_arrive(free);
  }

  // scores to score gradients, of the tile from `key` on.
  __device__ void differentiate(const KeyTiles& tiles, int key) {
#pragma unroll
    for (int i = 0; i < P::kKeys / 2; ++i) {
      const int half = i / 2 % 2;
      const float weight = exp2_approximate(fmaf(scores_[i], factor_, -lse_[half]));
      scores_[i] = weight * (d_weights_[i] - delta_[half]);
    }
    if (!tiles.masked(key)) return;
#pragma unroll
    for (int i = 0; i < P::kKeys / 2; ++i) {
      const int j = key + fragment_column(static_cast<int>(threadIdx.x), i);
      const int2 sees = sees_[i / 2 % 2];
      if (j < sees.x || j >= sees.y) scores_[i] = 0;
    }
  }

  __device__ void pack() { pack_results<P::kKeys>(d_scores_, scores_); }

  // Of the ring's current tile, from `key` on; all consumers together.
  __device__ void clear_keys(int key) {
    barrier_wait(shared_.key_full[keys_.stage], keys_.parity);
    const uint64_t spoilt = clear_together<P::kConsumers>(shared_.key[keys_.stage], P::kHeadSize, &shared_.not_finite);
    for (int half = 0; half < 2; ++half) poisoned_[half] |= (spoilt & rows_within(sees_[half], key)) != 0;
  }

  Shared<P>& shared_;
  int group_;  // this consumer's number
  int row_;    // this thread's first query; the second is 8 further
  float factor_;
  int2 sees_[2];
  float lse_[2], delta_[2];  // lse to base 2
  bool poisoned_[2];         // the row sees a key that is not finite
  Ring<P::kKeyStages> keys_;
  Ring<P::kValueStages> values_;
  int previous_ = 0;  // stage of keys
  Operand query_, d_out_;  // of narrow heads
  float scores_[P::kKeys / 2], d_weights_[P::kKeys / 2];
  uint32_t d_scores_[P::kKeys / 16][4];
  RowSums<P::kHeadSize> d_query_;
};

template <typename P>
__global__ void __launch_bounds__(P::kThreads, 1)
    d_query_kernel(const __grid_constant__ BackwardArguments a, const __grid_constant__ Maps<P> maps) {
  Shared<P>& shared = *reinterpret_cast<Shared<P>*>(dynamic_shared());
  if (threadIdx.x == 0) {
    barrier_init(shared.query_full, 1);
    for (int s = 0; s < P::kKeyStages; ++s) {
      barrier_init(shared.key_full[s], 1);
      barrier_init(shared.key_free[s], 4 * P::kConsumers);  // the consumers' warps
    }
    for (int s = 0; s < P::kValueStages; ++s) {
      barrier_init(shared.value_full[s], 1);
      barrier_init(shared.value_free[s], 4 * P::kConsumers);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (blockIdx.x == gridDim.x - 1) await_previous();  // d_key and d_value, which nothing here reads
  const auto [tile, head] = a.query_order[blockIdx.x];
  const int first_query = tile * P::kQueries;
  const KeyTiles tiles = key_tiles_of(a, first_query, P::kQueries, P::kKeys);
  if ((a.add_query || a.keeps_blind) && !tiles.any()) return;  // nothing to add

  if (threadIdx.x < 128) {
    give_back_registers<kProducerRegisters>();
    Producer<P> producer(shared, maps, head / a.group);
    if (threadIdx.x == 0 && tiles.any()) {  // a copy that nobody waits for may outlive the block
      producer.load_queries(head, first_query);
      producer.run(tiles);
    }
    __syncwarp();
    if (tiles.any_masked() && __syncthreads_or(0) && threadIdx.x == 0) producer.run(tiles);
  } else {
    take_registers<kConsumerRegisters>();
    Consumer<P> consumer(shared, a, head, first_query);
    if (tiles.any()) consumer.load_queries();
    consumer.run(tiles, false);
    if (tiles.any_masked() && __syncthreads_or(!consumer.finite())) consumer.run(tiles, true);
    consumer.store(a, head);
  }
}

template <int kHeadSize>
void queue(const BackwardArguments& a, cudaStream_t stream) {
  using P = Plan<kHeadSize>;
  const Maps<P> maps{heads_map(a.query, a.queries, a.heads, a.head_size, 64),
                     heads_map(a.d_out, a.queries, a.heads, a.head_size, 64),
                     heads_map(a.key, a.keys, a.kv_heads, a.head_size, P::kKeys),
                     heads_map(a.value, a.keys, a.kv_heads, a.head_size, P::kKeys)};
  // Fills what the last blocks of d_key and d_value leave idle.
  launch(Start::early, d_query_kernel<P>, ceil_div(a.queries, P::kQueries) * a.heads, P::kThreads,
         sizeof(Shared<P>), stream, a, maps);
}

}  // namespace

void attention_d_query_hopper(const BackwardArguments& arguments, cudaStream_t stream) {
  if (arguments.head_size <= 64) return queue<64>(arguments, stream);
  if (arguments.head_size <= 128) return queue<128>(arguments, stream);
  queue<256>(arguments, stream);
}

}  // namespace farspan::cuda
