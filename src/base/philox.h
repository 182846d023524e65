// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10, a counter-based random number generator: the value at any index is a pure function of (key, counter),
// so a parameter's or a token's randomness never depends on which rank computes it or in which order. Source: Salmon,
// Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3 and table 2.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace farspan {

class Philox {
 public:
  using Block = std::array<uint32_t, 4>;

  // `key` is the seed; `stream` separates uses of one seed (a parameter's name, "shuffle", "dropout").
  Philox(uint64_t key, uint64_t stream);
  Philox(uint64_t key, std::string_view stream);

  // Four independent 32-bit words for this index.
  Block block(uint64_t index) const;

  // Uniform in [0, 1) with 53 bits; word pair 0 or 1 of block(index / 2).
  double uniform(uint64_t index) const;

  // Standard normal by Box-Muller from block(index / 2): even indices take the cosine, odd the sine.
  double normal(uint64_t index) const;

 private:
  uint32_t key_[2];
  uint32_t stream_[2];
};

// 64-bit FNV-1a: the stream number of a name. http://www.isthe.com/chongo/tech/comp/fnv/
constexpr uint64_t name_hash(std::string_view name) {
  uint64_t hash = 14695981039346656037ull;
  for (char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

}  // namespace farspan
