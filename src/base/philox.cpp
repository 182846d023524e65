// SPDX-License-Identifier: Apache-2.0
#include "base/philox.h"

#include <cmath>
#include <numbers>

namespace farspan {
namespace {

constexpr uint32_t kMultiplier0 = 0xD2511F53;  // the four constants of Philox4x32 (paper, table 2)
constexpr uint32_t kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9;
constexpr uint32_t kWeyl1 = 0xBB67AE85;
constexpr int kRounds = 10;

double to_unit(uint32_t high, uint32_t low) {
  const uint64_t bits = (static_cast<uint64_t>(high) << 32 | low) >> 11;
  return static_cast<double>(bits) * 0x1.0p-53;
}

}  // namespace

Philox::Philox(uint64_t key, uint64_t stream)
    : key_{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)},
      stream_{static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)} {}

Philox::Philox(uint64_t key, std::string_view stream) : Philox(key, name_hash(stream)) {}

Philox::Block Philox::block(uint64_t index) const {
  Block c = {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), stream_[0], stream_[1]};
  uint32_t k0 = key_[0];
  uint32_t k1 = key_[1];
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kMultiplier0) * c[0];
    const uint64_t p1 = static_cast<uint64_t>(kMultiplier1) * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  return c;
}

double Philox::uniform(uint64_t index) const {
  const Block b = block(index / 2);
  return index % 2 == 0 ? to_unit(b[0], b[1]) : to_unit(b[2], b[3]);
}

double Philox::normal(uint64_t index) const {
  const Block b = block(index / 2);
  const double radius = std::sqrt(-2.0 * std::log1p(-to_unit(b[0], b[1])));
  const double angle = 2.0 * std::numbers::pi * to_unit(b[2], b[3]);
  return radius * (index % 2 == 0 ? std::cos(angle) : std::sin(angle));
}

}  // namespace farspan
