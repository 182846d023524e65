// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10 on the device: the same words as base/philox.h, which names the source and the constants.
#pragma once

#include <cstdint>

namespace farspan::cuda {

// a b, its lower word first. Spelt out: of a product of 64-bit numbers the compiler adds up parts that are zero.
__device__ __forceinline__ uint2 wide_product(uint32_t a, uint32_t b) {
  uint2 product;
  asm("{\n.reg .u64 p;\nmul.wide.u32 p, %2, %3;\nmov.b64 {%0, %1}, p;\n}"
      : "=r"(product.x), "=r"(product.y)
      : "r"(a), "r"(b));
  return product;
}

// The keys of the ten rounds. As an argument of a kernel they are constants of its instructions.
struct PhiloxKeys {
  uint32_t of_round[10][2];

  __host__ __device__ __forceinline__ explicit PhiloxKeys(uint64_t key) {
    for (uint32_t round = 0; round < 10; ++round) {
      of_round[round][0] = static_cast<uint32_t>(key) + round * 0x9E3779B9u;
      of_round[round][1] = static_cast<uint32_t>(key >> 32) + round * 0xBB67AE85u;
    }
  }
};

// Philox(key, stream).block(index), word i in the i-th component.
__device__ __forceinline__ uint4 philox(const PhiloxKeys& keys, uint64_t stream, uint64_t index) {
  uint4 c = {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(stream),
             static_cast<uint32_t>(stream >> 32)};
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint2 p0 = wide_product(0xD2511F53u, c.x), p1 = wide_product(0xCD9E8D57u, c.z);
    c = {p1.y ^ c.y ^ keys.of_round[round][0], p1.x, p0.y ^ c.w ^ keys.of_round[round][1], p0.x};
  }
  return c;
}
__device__ __forceinline__ uint4 philox(uint64_t key, uint64_t stream, uint64_t index) {
  return philox(PhiloxKeys(key), stream, index);
}

}  // namespace farspan::cuda
