// SPDX-License-Identifier: Apache-2.0
// The draws of attention dropout (ops/attention.h: AttentionDropout) on the device.
#pragma once

#include "ops/cuda/attention_arguments.h"
#include "ops/cuda/philox.cuh"

namespace farspan::cuda {

// The draws of one query head.
class HeadDraws {
 public:
  __device__ HeadDraws(const DropoutArguments& dropout, int head) : dropout_(dropout) {
    const uint4 words = philox(dropout.key, dropout.row, dropout.first_head + static_cast<uint64_t>(head));
    key_ = static_cast<uint64_t>(words.y) << 32 | words.x;
  }

  // Whether the pair of the block's query and key is kept. The last block of draws is remembered: neighbouring keys of
  // one query share it.
  __device__ bool keeps(int query, int key) {
    const uint64_t stream = static_cast<uint64_t>(dropout_.query_begin + query);
    const uint64_t position = static_cast<uint64_t>(dropout_.key_begin + key);
    if (stream != stream_ || position / 4 != index_) {
      stream_ = stream;
      index_ = position / 4;
      block_ = philox(key_, stream, index_);
    }
    const uint32_t low = position % 2 == 0 ? block_.x : block_.y;
    const uint32_t high = position % 2 == 0 ? block_.z : block_.w;
    return (position % 4 < 2 ? low : high) >= dropout_.threshold;
  }

 private:
  const DropoutArguments& dropout_;
  uint64_t key_;
  uint64_t stream_ = ~0ull;  // no position: those are below 2^63
  uint64_t index_ = ~0ull;
  uint4 block_{};
};

}  // namespace farspan::cuda
