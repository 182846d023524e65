// SPDX-License-Identifier: Apache-2.0
#include "comm/rank_order_sum.h"

#include <algorithm>

namespace farspan {
namespace {

// Bytes summed at a time: small enough for the stack and the first-level cache.
constexpr int64_t kBlockBytes = 4096;

template <typename T>
void sum(std::span<const std::byte* const> sources, int64_t offset, int64_t count, T* out) {
  constexpr int64_t kBlock = kBlockBytes / static_cast<int64_t>(sizeof(T));
  T block[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    std::copy_n(reinterpret_cast<const T*>(sources[0]) + offset + begin, n, block);
    for (const std::byte* source : sources.subspan(1)) {
      const T* x = reinterpret_cast<const T*>(source) + offset + begin;
      for (int64_t i = 0; i < n; ++i) block[i] += x[i];
    }
    std::copy_n(block, n, out + begin);
  }
}

}  // namespace

void sum_in_rank_order(DType dtype, std::span<const std::byte* const> sources, int64_t offset, int64_t count,
                       std::byte* out) {
  if (dtype == DType::f32) {
    sum(sources, offset, count, reinterpret_cast<float*>(out));
  } else {
    sum(sources, offset, count, reinterpret_cast<double*>(out));
  }
}

}  // namespace farspan
