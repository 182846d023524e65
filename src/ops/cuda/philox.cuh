// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10 on the device: the same words as base/philox.h, which names the source and the constants.
#pragma once

#include <cstdint>

namespace farspan::cuda {

// Philox(key, stream).block(index), word i in the i-th component.
__device__ __forceinline__ uint4 philox(uint64_t key, uint64_t stream, uint64_t index) {
  uint4 c = {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(stream),
             static_cast<uint32_t>(stream >> 32)};
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c.x;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c.z;
    c = {static_cast<uint32_t>(p1 >> 32) ^ c.y ^ k0, static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c.w ^ k1, static_cast<uint32_t>(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

}  // namespace farspan::cuda
