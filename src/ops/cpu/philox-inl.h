// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10 on vectors, compiled once per instruction set (so: a guard that toggles, after Highway's
// foreach_target). The same numbers as base/philox.h, which names the source and the constants.
//
// A lane of 64 bits holds one 32-bit word in its lower half and anything in the upper: the products of a round need
// whole lanes, and nothing has to be put back in between.

#if defined(FARSPAN_OPS_CPU_PHILOX_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef FARSPAN_OPS_CPU_PHILOX_INL_H
#undef FARSPAN_OPS_CPU_PHILOX_INL_H
#else
#define FARSPAN_OPS_CPU_PHILOX_INL_H
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "ops/dropout_rule.h"

HWY_BEFORE_NAMESPACE();
namespace farspan::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Half as many lanes as a vector of floats; no wider than the attention kernels' (attention_tiling.h).
using Words = hn::CappedTag<uint64_t, 8>;
using WordVec = hn::Vec<Words>;
constexpr Words kWords{};

// Products of the lower halves.
HWY_INLINE WordVec word_product(WordVec a, WordVec b) {
#if HWY_TARGET == HWY_SCALAR
  return WordVec((a.raw & 0xffffffff) * (b.raw & 0xffffffff));
#else
  const hn::Repartition<uint32_t, Words> halves;
  return hn::MulEven(hn::BitCast(halves, a), hn::BitCast(halves, b));
#endif
}

// Replaces the counters (c0, c1, c2, c3) by their four words under the key (k0, k1).
HWY_INLINE void philox(WordVec& c0, WordVec& c1, WordVec& c2, WordVec& c3, WordVec k0, WordVec k1) {
  const WordVec multiplier0 = hn::Set(kWords, 0xD2511F53), multiplier1 = hn::Set(kWords, 0xCD9E8D57);
  const WordVec weyl0 = hn::Set(kWords, 0x9E3779B9), weyl1 = hn::Set(kWords, 0xBB67AE85);
  for (int round = 0; round < 10; ++round) {
    const WordVec p0 = word_product(multiplier0, c0);
    const WordVec p1 = word_product(multiplier1, c2);
    c0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(p1), c1), k0);
    c2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(p0), c3), k1);
    c1 = p1;
    c3 = p0;
    k0 = hn::Add(k0, weyl0);
    k1 = hn::Add(k1, weyl1);
  }
}

// factors[i] = 0 where the draw of index first + i drops, else the rule's scale, for i in [0, count). Index i has word
// i % 4 of Philox(key, stream).block(i / 4). `first` is at least 0.
HWY_INLINE void dropout_factors(uint64_t key, uint64_t stream, int64_t first, int64_t count, const DropoutRule& rule,
                                float* factors) {
  constexpr int64_t kBlocks = hn::MaxLanes(Words{});
  const hn::CappedTag<uint32_t, 16> draw_tag;
  const hn::Rebind<float, decltype(draw_tag)> factor_tag;
  const int64_t step = static_cast<int64_t>(hn::Lanes(draw_tag));
  const auto threshold = hn::Set(draw_tag, rule.threshold);
  const auto scale = hn::Set(factor_tag, rule.scale);
  const WordVec lower = hn::Set(kWords, 0xffffffff);
  const WordVec k0 = hn::Set(kWords, key), k1 = hn::Set(kWords, key >> 32);
  alignas(64) uint64_t pairs[2 * kBlocks];
  float piece[16];
  for (int64_t block = first / 4; 4 * block < first + count; block += kBlocks) {
    WordVec c0 = hn::Iota(kWords, static_cast<uint64_t>(block));
    WordVec c1 = hn::ShiftRight<32>(c0), c2 = hn::Set(kWords, stream), c3 = hn::Set(kWords, stream >> 32);
    philox(c0, c1, c2, c3, k0, k1);
    hn::StoreInterleaved2(hn::Or(hn::And(c0, lower), hn::ShiftLeft<32>(c1)),
                          hn::Or(hn::And(c2, lower), hn::ShiftLeft<32>(c3)), kWords, pairs);
    const uint32_t* draws = reinterpret_cast<const uint32_t*>(pairs);
    for (int64_t d = 0; d < 4 * kBlocks; d += step) {
      const auto drops = hn::Lt(hn::LoadU(draw_tag, draws + d), threshold);
      const auto factor = hn::IfThenZeroElse(hn::RebindMask(factor_tag, drops), scale);
      const int64_t at = 4 * block + d - first;
      if (at >= 0 && at + step <= count) {
        hn::StoreU(factor, factor_tag, factors + at);
        continue;
      }
      hn::StoreU(factor, factor_tag, piece);
      for (int64_t i = 0; i < step; ++i)
        if (at + i >= 0 && at + i < count) factors[at + i] = piece[i];
    }
  }
}

}  // namespace farspan::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
