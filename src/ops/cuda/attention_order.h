// SPDX-License-Identifier: Apache-2.0
// In which order a kernel's thread blocks take its tiles. A GPU starts blocks in the order of their numbers, each as
// soon as there is room. Started last, a tile with much to do is waited for by all of them; so tiles with more to do
// come first. Tiles of like work, within a factor of two, stand in the order of their tokens (queries from the last to
// the first) and together head by head: neighbours share keys while these are in the cache.
#pragma once

#include "ops/cuda/attention_arguments.h"

namespace farspan::cuda {

// The order of tiles of `rows` queries (a multiple of kBoundsRows, kLeastOrderedQueries at least) of all heads, from
// the bounds. Behind find_query_bounds.
void order_query_tiles(const AttentionArguments& arguments, int rows, cudaStream_t stream);
// The same, and that of tiles of `key_rows` keys (kLeastOrderedKeys at least) of all key/value heads. Behind
// find_key_bounds too.
void order_tiles(const BackwardArguments& arguments, int query_rows, int key_rows, cudaStream_t stream);

}  // namespace farspan::cuda
