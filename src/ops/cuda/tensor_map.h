// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cuda.h>

#include "ops/cuda/attention_arguments.h"

namespace farspan::cuda {

// What Hopper's copy engine knows of a (tokens, heads, D) tensor in bf16.
using TensorMap = CUtensorMap;

// Copies are boxes of 64 columns and `rows` tokens of one head, laid out as ops/cuda/warpgroup_layout.h says. The view
// must have whole vectors (HeadsView::vectors).
TensorMap heads_map(const HeadsView& view, int tokens, int heads, int head_size, int rows);

}  // namespace farspan::cuda
