// SPDX-License-Identifier: Apache-2.0
// Forward attention in bf16 for Hopper: wgmma, fed by the copy engine.
//
// One block of threads owns a tile of queries of one head. One warpgroup, the producer, only asks the copy engine for
// keys and values; each of the others, the consumers, owns 64 of the queries. A consumer has the scores of the next tile
// of keys computed while the weights of this one are multiplied with its values, and the consumers take turns at the
// matrix units, so that these work for one while another turns scores into weights. The weights of a tile never leave the
// registers.
//
// Infinities and NaNs: a product with the zero weight of a masked pair is NaN. Rather than look at all values beforehand,
// results are looked at: where a tile of queries has a mask and a result that is not finite, all of it is computed again,
// with values that are not finite taken out (attention_tile.cuh: clear_not_finite does the same). On other rows the two
// computations are the same to the bit.
//
// Sources: Shah et al., FlashAttention-3 (2024), sections 3.1 and 3.2; Dao, FlashAttention-2 (2023).
#include <cmath>

#include "base/math.h"
#include "ops/cuda/attention_hopper.cuh"
#include "ops/cuda/attention_kernel_list.h"
#include "ops/cuda/attention_kernels_scratch.h"
#include "ops/cuda/attention_launch.cuh"
#include "ops/cuda/attention_order.h"
#include "ops/cuda/attention_state.cuh"

namespace farspan::cuda {
namespace {

template <int kHeadSize_>
struct Plan {
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kConsumers = kHeadSize == 64 ? 3 : 2;  // as many as the registers allow
  static constexpr int kQueries = 64 * kConsumers;
  static_assert(kQueries >= kLeastOrderedQueries);
  static constexpr int kKeys = kHeadSize <= 128 ? 128 : 64;  // of a tile
  static constexpr int kStages = 2;                          // tiles of keys, and of values, in shared memory
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kRegisters = kConsumers == 2 ? kConsumerRegisters : 160;  // of a consumer's thread
  static_assert(registers_suffice(kProducerRegisters, kRegisters, kConsumers));
  static constexpr int kColumns = kHeadSize <= 128 ? kHeadSize : 128;  // of the output, in one product
  static constexpr int kProducts = kHeadSize / kColumns;
};

template <typename P>
struct alignas(1024) Shared {
  unsigned char query[P::kConsumers][64 * P::kHeadSize * 2];
  unsigned char key[P::kStages][P::kKeys * P::kHeadSize * 2];
  unsigned char value[P::kStages][P::kKeys * P::kHeadSize * 2];
  CopyBarrier query_full;
  CopyBarrier key_full[P::kStages], key_free[P::kStages];
  CopyBarrier value_full[P::kStages], value_free[P::kStages];
  unsigned long long not_finite[P::kKeys / 64];
};

template <typename P>
struct Maps {
  TensorMap query, key, value;
};

template <typename P>
class Producer {
 public:
  __device__ Producer(Shared<P>& shared, const Maps<P>& maps, int kv_head)
      : shared_(shared), maps_(maps), kv_head_(kv_head) {}

  __device__ void load_queries(int head, int first_query) {
    barrier_expect(shared_.query_full, sizeof(shared_.query));
    for (int c = 0; c < P::kConsumers; ++c)
      copy_tile<P::kHeadSize, 64>(shared_.query[c], maps_.query, shared_.query_full, head, first_query + 64 * c);
  }

  __device__ void run(const KeyTiles& tiles) {
    for (int key = tiles.first; key < tiles.end; key += P::kKeys, ring_.advance()) {
      fill(shared_.key[ring_.stage], maps_.key, shared_.key_full[ring_.stage], shared_.key_free[ring_.stage], key);
      fill(shared_.value[ring_.stage], maps_.value, shared_.value_full[ring_.stage], shared_.value_free[ring_.stage], key);
    }
  }

 private:
  __device__ void fill(unsigned char* tile, const TensorMap& map, CopyBarrier& full, CopyBarrier& free, int key) {
    barrier_wait(free, ring_.parity ^ 1);
    barrier_expect(full, P::kKeys * P::kHeadSize * 2);
    copy_tile<P::kHeadSize, P::kKeys>(tile, map, full, kv_head_, key);
  }

  Shared<P>& shared_;
  const Maps<P>& maps_;
  int kv_head_;
  Ring<P::kStages> ring_;
};

template <typename P>
class Consumer {
 public:
  __device__ Consumer(Shared<P>& shared, const ForwardArguments& a, int first_query)
      : shared_(shared),
        group_(static_cast<int>(threadIdx.x) / 128 - 1),
        row_(first_query + 64 * group_ + fragment_row(static_cast<int>(threadIdx.x) % 128)),
        factor_(a.scale * kLog2E),
        query_(shared_address(shared.query[group_])) {
    for (int half = 0; half < 2; ++half) sees_[half] = row_ + 8 * half < a.queries ? a.bounds.rows[row_ + 8 * half] : int2{0, 0};
    if (group_ == P::kConsumers - 1) named_barrier_arrive(kTurn, 256);  // the first turn is consumer 0's
  }

  // careful: values that are not finite are taken out before use, and rows that see one become NaN.
  __device__ void run(const KeyTiles& tiles, bool careful) {
    for (int half = 0; half < 2; ++half) {
      maximum_[half] = -INFINITY;
      sum_[half] = 0;
    }
#pragma unroll
    for (int p = 0; p < P::kProducts; ++p)
#pragma unroll
      for (int i = 0; i < P::kColumns / 2; ++i) out_[p][i] = 0;
    if (!tiles.any()) return;
    barrier_wait(shared_.query_full, 0);

    barrier_wait(shared_.key_full[keys_.stage], keys_.parity);
    multiply_keys();
    warpgroup_wait<0>();
    pin(scores_);
    release(shared_.key_free[keys_.stage]);
    keys_.advance();
    weigh(tiles, tiles.first);
    pack();

    for (int key = tiles.first + P::kKeys; key < tiles.end; key += P::kKeys) {
      if (careful && tiles.masked(key - P::kKeys)) clear_values(key - P::kKeys);
      barrier_wait(shared_.key_full[keys_.stage], keys_.parity);
      named_barrier_sync(kTurn + group_, 256);
      multiply_keys();
      barrier_wait(shared_.value_full[values_.stage], values_.parity);
      multiply_values();
      named_barrier_arrive(kTurn + (group_ + 1) % P::kConsumers, 256);
      warpgroup_wait<1>();
      pin(scores_);
      release(shared_.key_free[keys_.stage]);
      keys_.advance();
      weigh(tiles, key);
      warpgroup_wait<0>();
      pin_out();
      release(shared_.value_free[values_.stage]);
      values_.advance();
      shrink_out();
      pack();
    }
    if (careful && tiles.masked(tiles.last())) clear_values(tiles.last());
    barrier_wait(shared_.value_full[values_.stage], values_.parity);
    multiply_values();
    warpgroup_wait<0>();
    pin_out();
    release(shared_.value_free[values_.stage]);
    values_.advance();
  }

  __device__ bool finite() const {
    float probe = sum_[0] * 0 + sum_[1] * 0;
#pragma unroll
    for (int p = 0; p < P::kProducts; ++p)
#pragma unroll
      for (int i = 0; i < P::kColumns / 2; ++i) probe = fmaf(out_[p][i], 0.0f, probe);
    return probe == 0;
  }

  __device__ void store(const ForwardArguments& a, int head) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum_[half] += __shfl_xor_sync(0xffffffffu, sum_[half], 1);
      sum_[half] += __shfl_xor_sync(0xffffffffu, sum_[half], 2);
    }
    const StateUpdate updates[2] = {{a, head, row_, maximum_[0] * a.scale, sum_[0]},
                                    {a, head, row_ + 8, maximum_[1] * a.scale, sum_[1]}};
    __syncwarp();  // the rows' four lanes have read their lse
#pragma unroll
    for (int p = 0; p < P::kProducts; ++p) {
      const auto column = [&](int j) { return P::kColumns * p + 8 * j + lane % 4 * 2; };
      float2 before[2][P::kColumns / 8];
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < P::kColumns / 8; ++j) before[half][j] = updates[half].before(column(j));
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < P::kColumns / 8; ++j)
          updates[half].store_out(column(j), out_[p][4 * j + 2 * half], out_[p][4 * j + 2 * half + 1], before[half][j]);
    }
    if (lane % 4 != 0) return;
    updates[0].store_lse();
    updates[1].store_lse();
  }

 private:
  // scores = Q K^T, begun.
  __device__ void multiply_keys() {
    const uint32_t key = shared_address(shared_.key[keys_.stage]);
    pin(scores_);
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < P::kHeadSize / 16; ++k)
      warpgroup_multiply<Major::summed>(scores_, operand<Major::summed>(query_ + summed_offset<64>(k)),
                                        operand<Major::summed>(key + summed_offset<P::kKeys>(k)), k > 0);
    warpgroup_commit();
  }

  // out += weights V, begun.
  __device__ void multiply_values() {
    const uint32_t value = shared_address(shared_.value[values_.stage]);
    pin_out();
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < P::kKeys / 16; ++k)
#pragma unroll
      for (int p = 0; p < P::kProducts; ++p)
        warpgroup_multiply<Major::kept>(
            out_[p], weights_[k],
            operand<Major::kept>(value + kept_offset<P::kKeys>(k, p * P::kColumns), P::kKeys * 128),
            true);
    warpgroup_commit();
  }

  __device__ void pin_out() {
#pragma unroll
    for (int p = 0; p < P::kProducts; ++p) pin(out_[p]);
  }

  __device__ void release(CopyBarrier& free) {
    if (threadIdx.x % 32 == 0) barrier_arrive(free);
  }

  // Scores of the tile from `key` on to weights; maximum_, sum_ and shrink_ along.
  __device__ void weigh(const KeyTiles& tiles, int key) {
    if (tiles.masked(key)) {
#pragma unroll
      for (int i = 0; i < P::kKeys / 2; ++i) {
        const int j = key + fragment_column(static_cast<int>(threadIdx.x), i);
        const int2 sees = sees_[i / 2 % 2];
        if (j < sees.x || j >= sees.y) scores_[i] = -INFINITY;
      }
      return weigh_all<true>();
    }
    weigh_all<false>();
  }

  // kExact: a score that is its row's maximum has the weight 1 and not nearly 1.
  template <bool kExact>
  __device__ void weigh_all() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float maximum = maximum_[half];
#pragma unroll
      for (int i = 2 * half; i < P::kKeys / 2; i += 4) maximum = fmaxf(maximum, fmaxf(scores_[i], scores_[i + 1]));
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 2));
      const float base = maximum == -INFINITY ? 0 : maximum;  // nothing seen yet: all weights are 2^-inf
      shrink_[half] = exp2_approximate((maximum_[half] - base) * factor_);
      maximum_[half] = maximum;
      const float shift = -base * factor_;
      float sums[2] = {0, 0};
#pragma unroll
      for (int i = 2 * half; i < P::kKeys / 2; i += 4)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = scores_[i + c];
          x = exp2_approximate(kExact ? (x - base) * factor_ : fmaf(x, factor_, shift));
          sums[c] += x;
        }
      sum_[half] = fmaf(sum_[half], shrink_[half], sums[0] + sums[1]);
    }
  }

  __device__ void shrink_out() {
    if (!__any_sync(0xffffffffu, shrink_[0] != 1 || shrink_[1] != 1)) return;
#pragma unroll
    for (int p = 0; p < P::kProducts; ++p)
#pragma unroll
      for (int i = 0; i < P::kColumns / 2; ++i) out_[p][i] *= shrink_[i / 2 % 2];
  }

  __device__ void pack() {
#pragma unroll
    for (int k = 0; k < P::kKeys / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) weights_[k][i] = pack_bf16(scores_[8 * k + 2 * i], scores_[8 * k + 2 * i + 1]);
  }

  // Of the current tile of values, from `key` on; all consumers together.
  __device__ void clear_values(int key) {
    constexpr int kAll = 128 * P::kConsumers;
    const int thread = static_cast<int>(threadIdx.x) - 128;
    barrier_wait(shared_.value_full[values_.stage], values_.parity);
    if (thread < P::kKeys / 64) shared_.not_finite[thread] = 0;
    named_barrier_sync(kAllConsumers, kAll);
    uint4* const vectors = reinterpret_cast<uint4*>(shared_.value[values_.stage]);
    for (int i = thread; i < P::kKeys * P::kHeadSize / 8; i += kAll) {
      uint4& x = vectors[i];
      if (!any_not_finite(x)) continue;
      x = {finite_part(x.x), finite_part(x.y), finite_part(x.z), finite_part(x.w)};
      const int row = i / 8 % P::kKeys;
      atomicOr(&shared_.not_finite[row / 64], 1ull << row % 64);
    }
    fence_async_proxy();
    named_barrier_sync(kAllConsumers, kAll);
    for (int half = 0; half < 2; ++half)
      for (int part = 0; part < P::kKeys / 64; ++part)
        if ((shared_.not_finite[part] & rows_within(sees_[half], key + 64 * part)) != 0) sum_[half] = NAN;
    named_barrier_sync(kAllConsumers, kAll);
  }

  Shared<P>& shared_;
  int group_;  // this consumer's number
  int row_;    // this thread's first query; the second is 8 further
  float factor_;
  uint32_t query_;
  int2 sees_[2];
  Ring<P::kStages> keys_, values_;
  float maximum_[2], sum_[2], shrink_[2];  // sum_: of this thread's columns only
  float scores_[P::kKeys / 2];
  uint32_t weights_[P::kKeys / 16][4];
  float out_[P::kProducts][P::kColumns / 2];
};

template <typename P>
__global__ void __launch_bounds__(P::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArguments a, const __grid_constant__ Maps<P> maps) {
  Shared<P>& shared = *reinterpret_cast<Shared<P>*>(dynamic_shared());
  if (threadIdx.x == 0) {
    barrier_init(shared.query_full, 1);
    for (int s = 0; s < P::kStages; ++s) {
      barrier_init(shared.key_full[s], 1);
      barrier_init(shared.value_full[s], 1);
      barrier_init(shared.key_free[s], 4 * P::kConsumers);  // the consumers' warps
      barrier_init(shared.value_free[s], 4 * P::kConsumers);
    }
    barrier_init_fence();
  }
  __syncthreads();

  const auto [tile, head] = a.query_order[blockIdx.x];
  const int first_query = tile * P::kQueries;
  const KeyTiles tiles = key_tiles_of(a, first_query, P::kQueries, P::kKeys);
  if ((a.add || a.keeps_blind) && !tiles.any()) return;  // nothing to add

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
    take_registers<P::kRegisters>();
    Consumer<P> consumer(shared, a, first_query);
    consumer.run(tiles, false);
    if (tiles.any_masked() && __syncthreads_or(!consumer.finite())) consumer.run(tiles, true);
    consumer.store(a, head);
  }
}

template <int kHeadSize>
void queue(const ForwardArguments& a, cudaStream_t stream) {
  using P = Plan<kHeadSize>;
  const Maps<P> maps{heads_map(a.query, a.queries, a.heads, a.head_size, 64),
                     heads_map(a.key, a.keys, a.kv_heads, a.head_size, P::kKeys),
                     heads_map(a.value, a.keys, a.kv_heads, a.head_size, P::kKeys)};
  order_query_tiles(a, P::kQueries, stream);
  launch(forward_kernel<P>, ceil_div(a.queries, P::kQueries) * a.heads, P::kThreads, sizeof(Shared<P>), stream, a, maps);
}

}  // namespace

void attention_forward_hopper(const ForwardArguments& arguments, cudaStream_t stream) {
  if (arguments.head_size <= 64) return queue<64>(arguments, stream);
  if (arguments.head_size <= 128) return queue<128>(arguments, stream);
  queue<256>(arguments, stream);
}

}  // namespace farspan::cuda
