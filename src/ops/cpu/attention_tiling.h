// SPDX-License-Identifier: Apache-2.0
// Tile sizes and arguments of the attention kernels: everything about them that does not depend on the vector width.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

#include "base/math.h"
#include "ops/dropout_rule.h"

namespace farspan::cpu {

// Widest vector the kernels use, in floats; wider machines would only lose lanes to short documents.
inline constexpr int64_t kMaxLanes = 16;

// A panel is the two vectors that a register block of scores is wide.
inline constexpr int64_t kPanelVectors = 2;

// Multiples of every panel width and of most register block heights. A tile of keys and values of head size 64 is 48
// KiB: it stays in the second-level cache while all panels of the task pass over it.
inline constexpr int64_t kForwardKeys = 96;

// All rows pass over each chunk of keys, so a larger chunk reads them less often: with 8 heads of 64, where a head's
// rows lie 2 KiB apart and share few cache sets, 192 keys and 48 rows run 1.2 times as fast as 96 and 96.
inline constexpr int64_t kBackwardKeys = 192;
inline constexpr int64_t kBackwardRows = 48;

inline constexpr int64_t padded_head_size(int64_t head_size) { return round_up(head_size, kMaxLanes); }

// Rows of a forward task, a multiple of every panel width: as many as keep queries and outputs near 192 KiB, so that
// packing a key tile is paid back.
inline constexpr int64_t kMaxForwardRows = 384;
inline constexpr int64_t forward_rows(int64_t head_size) {
  return std::clamp<int64_t>(round_down(24576 / padded_head_size(head_size), 32), 96, kMaxForwardRows);
}

// Half-open range of keys, counted from the block's first.
struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool empty() const { return begin >= end; }
};

constexpr KeyRange intersect(KeyRange a, KeyRange b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

// Rows of D elements of an input; strides in elements.
struct InputRows {
  const void* data = nullptr;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

struct OutputRows {
  float* data = nullptr;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  float* row(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// One float per (head, query).
struct PerHead {
  float* data = nullptr;
  int64_t head_stride = 0;
  float& at(int64_t query, int64_t head) const { return data[head * head_stride + query]; }
};

struct KernelBlock {
  InputRows query, key, value;
  bool bf16 = false;
  const int64_t* lo = nullptr;
  const int64_t* hi = nullptr;
  int64_t lo_stride = 1;
  int64_t hi_stride = 1;
  int64_t key_begin = 0;
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t kv_heads = 0;
  int64_t group = 1;  // query heads per key/value head
  int64_t head_size = 0;
  float scale = 1;
  const uint64_t* draw_keys = nullptr;  // per query head, the key of its dropout draws; null: no dropout
  DropoutRule drop;
  int64_t query_begin = 0;

  bool drops() const { return draw_keys != nullptr; }
  int64_t rows() const { return queries * group; }
  int64_t query_of(int64_t row) const { return row / group; }
  int64_t head_of(int64_t row, int64_t kv_head) const { return kv_head * group + row % group; }

  // Keys that a row sees; begin == end when none.
  KeyRange visible(int64_t row) const {
    const int64_t i = query_of(row);
    // Compared before subtracting: positions may be anything that fits in 64 bits.
    const int64_t begin = std::max(lo[i * lo_stride], key_begin) - key_begin;
    const int64_t end = std::min(hi[i * hi_stride], key_begin + keys) - key_begin;
    return end > begin ? KeyRange{begin, end} : KeyRange{};
  }
};

struct ForwardArguments {
  KernelBlock block;
  OutputRows out;
  PerHead lse;
};

struct BackwardArguments {
  KernelBlock block;
  InputRows d_out;
  PerHead lse, delta;
  OutputRows d_query, d_key, d_value;
  // Per row tile, the smallest range that holds all keys its rows see.
  const KeyRange* tile_ranges = nullptr;
  // Per (chunk, key/value head): row tiles whose d_query this chunk is done with.
  std::atomic<int64_t>* progress = nullptr;
};

// Hands out consecutive pieces of a task's scratch.
class ScratchCursor {
 public:
  explicit ScratchCursor(float* begin) : next_(begin) {}
  float* take(int64_t floats) {
    float* taken = next_;
    next_ += round_up(floats, kMaxLanes);
    return taken;
  }
  KeyRange* take_ranges(int64_t count) {
    return new (take(count * static_cast<int64_t>(sizeof(KeyRange) / sizeof(float)))) KeyRange[count];
  }

 private:
  float* next_;
};

}  // namespace farspan::cpu
