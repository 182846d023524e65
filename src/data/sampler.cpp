// SPDX-License-Identifier: Apache-2.0
// The epoch's permutation is a keyed bijection of [0, rows), computed for one index at a time: nothing is stored, so a
// billion rows cost no memory and one Sampler may be asked by any number of threads.
//
// A Feistel network permutes [0, 2^(2h)), the smallest such power of two that holds `rows`; its round function is
// Philox, keyed by seed, epoch and round. An image outside [0, rows) is put through again until it falls inside ("cycle
// walking"), which keeps the map one-to-one. The domain is below 4 * rows, so that takes fewer than four passes on
// average. Sources: Luby, Rackoff, SIAM J. Comput. 17 (1988); Black, Rogaway, "Ciphers with arbitrary finite domains",
// CT-RSA 2002, section 3.
#include <bit>
#include <utility>

#include "base/error.h"
#include "base/philox.h"
#include "data/dataset.h"

namespace farspan {
namespace {

// Four rounds make a pseudo-random permutation; twice that, because on tiny domains the proof says little.
constexpr int kRounds = 8;

uint64_t feistel(uint64_t x, int half_bits, uint64_t key) {
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  uint64_t left = x >> half_bits;
  uint64_t right = x & mask;
  for (uint64_t round = 0; round < kRounds; ++round) {
    const uint64_t mixed = Philox(key, round).block(right)[0] & mask;
    left = std::exchange(right, left ^ mixed);
  }
  return left << half_bits | right;
}

int64_t permute(int64_t index, int64_t size, uint64_t key) {
  const int bits = static_cast<int>(std::bit_width(static_cast<uint64_t>(size - 1)));
  const int half_bits = bits < 2 ? 1 : (bits + 1) / 2;
  uint64_t x = static_cast<uint64_t>(index);
  do x = feistel(x, half_bits, key);
  while (x >= static_cast<uint64_t>(size));
  return static_cast<int64_t>(x);
}

}  // namespace

Sampler::Sampler(int64_t rows, int64_t seed, bool shuffle) : rows_(rows), seed_(seed), shuffle_(shuffle) {
  FARSPAN_CHECK(rows >= 1, "sampler over {} rows; needs at least one", rows);
}

int64_t Sampler::row_of(int64_t sample) const {
  FARSPAN_CHECK(sample >= 0, "sampler asked for sample {}", sample);
  const int64_t index = sample % rows_;
  if (!shuffle_) return index;
  const Philox::Block word =
      Philox(static_cast<uint64_t>(seed_), "shuffle").block(static_cast<uint64_t>(epoch_of(sample)));
  return permute(index, rows_, static_cast<uint64_t>(word[0]) << 32 | word[1]);
}

}  // namespace farspan
