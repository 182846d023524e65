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
    stores_ = query < a.queries && (seen_ || !a.add);
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

  // Columns `column` and the next of `total`, the sum of exp(score - maximum) * value.
  __device__ void store_out(int column, float first, float second) const {
    if (!stores_ || column >= a_.head_size) return;
    first = seen_ ? first * weight_ : 0;
    second = seen_ ? second * weight_ : 0;
    const int64_t offset = query_ * a_.out.token_stride + column;
    if (!a_.add) return store_pair(a_.out, head_, query_, column, first, second, a_.head_size, false);
    float* const out = head_of<float>(a_.out, head_) + offset;
    if (a_.out.pairs) {
      float2& pair = *reinterpret_cast<float2*>(out);
      pair = {keep_ * pair.x + first, keep_ * pair.y + second};
      return;
    }
    out[0] = keep_ * out[0] + first;
    if (column + 1 < a_.head_size) out[1] = keep_ * out[1] + second;
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
