// SPDX-License-Identifier: Apache-2.0
// How much scratch our own attention kernels use: who sees whom, and in which order tiles are taken
// (attention_arguments.h: BlockBounds, TilePlace).
#pragma once

#include <cstdint>

#include "base/math.h"
#include "ops/cuda/scratch.h"

namespace farspan::cuda {

// Of the smallest tiles whose order is kept.
inline constexpr int64_t kLeastOrderedQueries = 128;
inline constexpr int64_t kLeastOrderedKeys = 64;

inline int64_t ordered_query_tiles(int64_t queries, int64_t heads) {
  return ceil_div(queries, kLeastOrderedQueries) * heads;
}
inline int64_t ordered_key_tiles(int64_t keys, int64_t kv_heads) {
  return ceil_div(keys, kLeastOrderedKeys) * kv_heads;
}

inline int64_t attention_kernel_forward_scratch(int64_t queries, int64_t heads) {
  return scratch_part(queries * 8) + scratch_part(ceil_div(queries, 64) * 16) +
         scratch_part(ordered_query_tiles(queries, heads) * 8);
}

inline int64_t attention_kernel_backward_scratch(int64_t queries, int64_t heads, int64_t keys, int64_t kv_heads) {
  return attention_kernel_forward_scratch(queries, heads) + scratch_part(ceil_div(keys, 64) * 8) +
         scratch_part(ordered_key_tiles(keys, kv_heads) * 8);
}

}  // namespace farspan::cuda
