// SPDX-License-Identifier: Apache-2.0
#include "base/philox.h"

#include <cmath>
#include <gtest/gtest.h>

namespace farspan {
namespace {

// Known answers of the authors' Random123 distribution, kat_vectors, philox4x32 with 10 rounds.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(Philox(0, uint64_t{0}).block(0), (Philox::Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox(~uint64_t{0}, ~uint64_t{0}).block(~uint64_t{0}),
            (Philox::Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

TEST(Philox, StreamsOfOneSeedDiffer) {
  EXPECT_NE(Philox(1, "layers.0.qkv.weight").block(0), Philox(1, "layers.1.qkv.weight").block(0));
  EXPECT_NE(Philox(1, "x").block(0), Philox(2, "x").block(0));
}

TEST(Philox, UniformAndNormalHaveTheirMoments) {
  const Philox random(3, "moments");
  constexpr uint64_t kDraws = 200000;
  double uniform = 0;
  double normal = 0;
  double square = 0;
  for (uint64_t i = 0; i < kDraws; ++i) {
    const double u = random.uniform(i);
    ASSERT_TRUE(u >= 0 && u < 1);
    uniform += u;
    const double n = random.normal(i);
    ASSERT_TRUE(std::isfinite(n));
    normal += n;
    square += n * n;
  }
  // Five standard errors of each mean.
  EXPECT_NEAR(uniform / kDraws, 0.5, 5 * std::sqrt(1.0 / 12 / kDraws));
  EXPECT_NEAR(normal / kDraws, 0, 5 / std::sqrt(double{kDraws}));
  EXPECT_NEAR(square / kDraws, 1, 5 * std::sqrt(2.0 / kDraws));
}

}  // namespace
}  // namespace farspan
