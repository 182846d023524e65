// SPDX-License-Identifier: Apache-2.0
// What the Hopper attention kernels share: tiles of one head in shared memory, and rings of them that the copy engine
// fills and warpgroups empty.
#pragma once

#include "ops/cuda/attention_tile.cuh"
#include "ops/cuda/copy_engine.cuh"
#include "ops/cuda/warpgroup.cuh"

namespace farspan::cuda {

// A tile of kRows tokens: boxes of 64 columns one after the other, kRows * 128 bytes each.
template <int kHeadSize, int kRows>
__device__ void copy_tile(unsigned char* tile, const TensorMap& map, CopyBarrier& barrier, int head, int token) {
  for (int column = 0; column < kHeadSize; column += 64)
    copy_box(tile + column * kRows * 2, map, barrier, column, head, token);
}

// Where the 16 columns from 16 k on begin in such a tile, as an operand whose columns are summed over.
template <int kRows>
__device__ constexpr uint32_t summed_offset(int k) {
  return static_cast<uint32_t>(k / 4 * kRows * 128 + k % 4 * 32);
}

// A place in a ring of stages, and the parity of the phase in which that stage is filled.
template <int kStages>
struct Ring {
  int stage = 0;
  int parity = 0;
  __device__ void advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

}  // namespace farspan::cuda
