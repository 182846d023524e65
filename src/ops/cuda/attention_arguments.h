// SPDX-License-Identifier: Apache-2.0
// What an attention kernel is given: sizes, strides and device pointers, by value. Inside a block, queries and keys are
// counted by 32-bit numbers; offsets into tensors are 64-bit.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "ops/attention.h"

namespace farspan::cuda {

// Rows of queries, or of keys, that share one entry of the bounds below.
inline constexpr int kBoundsRows = 64;

// (tokens, heads, D) with neighbouring elements in the last dimension.
struct HeadsView {
  char* data = nullptr;
  int64_t token_stride = 0;  // elements
  int64_t head_stride = 0;
  bool f32 = false;      // else bf16
  bool vectors = false;  // every row begins at a multiple of 16 bytes and is whole 16-byte vectors long
  bool pairs = false;    // every row begins at a multiple of two elements and has an even length
};

// (heads, queries) f32.
struct RowsView {
  float* data = nullptr;
  int64_t head_stride = 0;
};

// Which keys kBoundsRows queries see. A key outside [first, last) is seen by none, one inside [all_first, all_last) by
// all.
struct TileBounds {
  int first, last, all_first, all_last;
};

// Who sees whom, in device memory, counted from the block's first query and key (attention_bounds.h).
struct BlockBounds {
  int2* rows = nullptr;         // per query: keys [x, y), (0, 0) where it sees none
  TileBounds* tiles = nullptr;  // per kBoundsRows queries
  int2* key_tiles = nullptr;    // backward, per kBoundsRows keys: entries [x, y) of `tiles` that see any of them
};

// Which tile and which head each of a kernel's thread blocks takes, in device memory: those with the most to do first
// (attention_order.h).
struct TilePlace {
  int tile, head;
};

struct DropoutArguments {
  uint32_t threshold = 0;  // a draw below it drops
  float scale = 1;         // of what is kept
  uint64_t key = 0;
  uint64_t row = 0;
  uint64_t first_head = 0;
  int64_t query_begin = 0;
  int64_t key_begin = 0;
};

struct AttentionArguments {
  HeadsView query, key, value;
  BlockBounds bounds;
  TilePlace* query_order = nullptr;  // of the kernels that own tiles of queries
  int queries = 0;
  int keys = 0;
  int heads = 0;
  int kv_heads = 0;
  int group = 0;  // query heads per key/value head
  int head_size = 0;
  float scale = 1;
  bool keeps_blind = false;
  DropoutArguments dropout;
};

struct ForwardArguments : AttentionArguments {
  HeadsView out;
  RowsView lse;
  bool add = true;  // to the running state; else begin it
};

struct BackwardArguments : AttentionArguments {
  TilePlace* key_order = nullptr;  // of the kernel that owns tiles of keys
  HeadsView d_out;
  RowsView lse, delta;
  HeadsView d_query, d_key, d_value;
  bool add_query = true;  // to what is there; else overwrite
  bool add_key_value = true;
};

}  // namespace farspan::cuda
