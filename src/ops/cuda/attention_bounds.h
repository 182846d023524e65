// SPDX-License-Identifier: Apache-2.0
// The first step of every attention kernel: from lo and hi (row positions, per query) the keys of the block that each
// query sees, and for whole tiles of queries and keys what can be skipped and what needs no mask. Kept in scratch.
#pragma once

#include "ops/cuda/attention_arguments.h"
#include "ops/cuda/scratch_parts.h"

namespace farspan::cuda {

// Where bounds.rows and bounds.tiles lie.
BlockBounds place_query_bounds(ScratchParts& scratch, int64_t queries);

// Fills bounds.rows and bounds.tiles.
void find_query_bounds(const AttentionBlock& block, const BlockBounds& bounds, cudaStream_t stream);
// Fills bounds.key_tiles from bounds.tiles.
void find_key_bounds(const AttentionBlock& block, const BlockBounds& bounds, cudaStream_t stream);

}  // namespace farspan::cuda
