// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/cuda/attention_arguments.h"

namespace farspan::cuda {

// The tiles of kBoundsRows queries that see any of `keys` keys from `first_key` on: those of the first query head of the
// key/value head's group in ascending order, then those of the second, and so on. The same for all threads.
class QueryWalk {
 public:
  __device__ QueryWalk(const AttentionArguments& a, int kv_head, int first_key, int keys)
      : tiles_(a.bounds.tiles),
        first_key_(first_key),
        end_key_(first_key + keys),
        head_(kv_head * a.group),
        end_head_(head_ + a.group) {
    const int last_entry = min((a.keys - 1) / kBoundsRows, (end_key_ - 1) / kBoundsRows);
    int2 range{0, 0};
    for (int entry = first_key / kBoundsRows; entry <= last_entry; ++entry) {
      const int2 seen_by = a.bounds.key_tiles[entry];
      if (seen_by.x == seen_by.y) continue;
      range = range.x == range.y ? seen_by : int2{min(range.x, seen_by.x), max(range.y, seen_by.y)};
    }
    first_ = tile_ = range.x;
    end_ = range.y;
    if (first_ == end_) head_ = end_head_;
    settle();
  }

  __device__ bool done() const { return head_ == end_head_; }
  __device__ int head() const { return head_; }
  __device__ int first_query() const { return tile_ * kBoundsRows; }
  // Some query of the tile does not see some of the keys.
  __device__ bool masked() const { return first_key_ < bounds_.all_first || end_key_ > bounds_.all_last; }

  __device__ void advance() {
    ++tile_;
    settle();
  }

 private:
  // Goes on to the next tile that sees any of the keys, from this one on.
  __device__ void settle() {
    while (!done()) {
      if (tile_ == end_) {
        tile_ = first_;
        ++head_;
        continue;
      }
      bounds_ = tiles_[tile_];
      if (bounds_.first < end_key_ && bounds_.last > first_key_) return;
      ++tile_;
    }
  }

  const TileBounds* tiles_;
  int first_key_, end_key_;
  int head_, end_head_;
  int first_, end_;
  int tile_;
  TileBounds bounds_{};
};

}  // namespace farspan::cuda
