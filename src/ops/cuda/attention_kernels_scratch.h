// SPDX-License-Identifier: Apache-2.0
// How much scratch our own attention kernels use: who sees whom, as attention_arguments.h: BlockBounds has it.
#pragma once

#include <cstdint>

#include "base/math.h"

namespace farspan::cuda {

inline int64_t attention_kernel_forward_scratch(int64_t queries) {
  const int64_t tiles = ceil_div(queries, 64);
  return round_up(queries * 8, 256) + round_up(tiles * 16, 256);
}

inline int64_t attention_kernel_backward_scratch(int64_t queries, int64_t keys) {
  return attention_kernel_forward_scratch(queries) + round_up(ceil_div(keys, 64) * 8, 256);
}

}  // namespace farspan::cuda
