// SPDX-License-Identifier: Apache-2.0
// The end of every forward kernel: what a block of keys gives a query is merged into the running state in fp32, or
// begins it.
#pragma once

#include "ops/cuda/attention_tile.cuh"

namespace farspan::cuda {

// One query of one head. Made before any thread stores the row's lse.
class StateUpdate {
 public:
  // sum: of exp(score - maximum) over the keys seen; 0: none is. Queries past the last are left alone.
  __device__ StateUpdate(const ForwardArguments& a, int head, int query, float maximum, float sum)
      : a_(a), head_(head), query_(query), seen_(!(sum == 0)) {
    stores_ = query < a.queries && (seen_ || (!a.add && !keeps_blind(a, query)));
    if (!stores_) return;
    lse_at_ = a.lse.data + head * a.lse.head_stride + query;
    lse_ = seen_ ? maximum + logf(sum) : -INFINITY;
    if (seen_) weight_ = a.dropout.scale / sum;
    if (!a.add) return;
    const float before = *lse_at_;
    const float larger = fmaxf(before, lse_);
    const float share_before = expf(before - larger), share = expf(lse_ - larger);
    keep_ = share_before / (share_before + share);
    weight_ *= share / (share_before + share);
    lse_ = larger + logf(share_before + share);
  }

  __device__ void store_lse() const {
    if (stores_) *lse_at_ = lse_;
  }

  // What is there in columns `column` and the next, of which store_out keeps a part; best read for all columns first.
  __device__ float2 before(int column) const {
    return pair_before(a_.out, head_, query_, column, a_.head_size, a_.add && stores_);
  }

  // Columns `column` and the next of the sum of exp(score - maximum) * value.
  __device__ void store_out(int column, float first, float second, float2 before) const {
    if (!stores_) return;
    first = seen_ ? first * weight_ : 0;
    second = seen_ ? second * weight_ : 0;
    store_pair(a_.out, head_, query_, column, first, second, a_.head_size, float2{keep_ * before.x, keep_ * before.y});
  }

 private:
  const ForwardArguments& a_;
  int head_, query_;
  bool seen_;
  bool stores_ = false;
  float* lse_at_ = nullptr;
  float lse_ = 0;
  float keep_ = 0;
  float weight_ = 0;
};

}  // namespace farspan::cuda
