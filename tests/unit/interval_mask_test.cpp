// SPDX-License-Identifier: Apache-2.0
// The interval mask against a rule written pair by pair, and its counts against counting.
#include "parallel/interval_mask.h"

#include <algorithm>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <vector>

#include "base/error.h"
#include "parallel/balanced_layout.h"

namespace farspan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

bool may_see(const std::vector<Span>& documents, MaskRule rule, int64_t q, int64_t k) {
  for (Span d : documents) {
    const bool together = q >= d.begin && q < d.end && k >= d.begin && k < d.end;
    if (!together) continue;
    if (k - d.begin < rule.prefix) return true;
    if (rule.causal && k > q) return false;
    const int64_t distance = q > k ? q - k : k - q;
    return rule.window == 0 || distance < rule.window;
  }
  return false;
}

const std::vector<std::vector<Span>>& document_lists() {
  static const std::vector<std::vector<Span>> lists = {
      {{0, 24}},                          // no boundaries
      {{0, 1}, {1, 3}, {3, 8}, {8, 19}},  // 1, 2, 5, 11 and padding
      {{0, 3}, {4, 10}},                  // a gap and padding
      {{5, 6}, {6, 7}, {7, 24}},          // padding first
      {},                                 // padding only
  };
  return lists;
}

const std::vector<MaskRule>& rules() {
  static const std::vector<MaskRule> list = {
      {.causal = true},
      {.causal = false},
      {.causal = true, .window = 1},
      {.causal = true, .window = 4},
      {.causal = true, .window = std::numeric_limits<int64_t>::max()},
      {.causal = false, .window = 3},
      {.causal = true, .prefix = 3},
      {.causal = true, .prefix = std::numeric_limits<int64_t>::max()},
      {.causal = false, .prefix = 2},
  };
  return list;
}

TEST(IntervalMask, RunsSayTheSameAsFill) {
  constexpr int64_t kLength = 24;
  for (const auto& documents : document_lists())
    for (const MaskRule& rule : rules()) {
      const IntervalMask mask(documents, rule);
      for (int64_t begin = 0; begin < kLength; ++begin)
        for (int64_t end = begin; end <= kLength; ++end) {
          std::vector<int64_t> lo(static_cast<size_t>(end - begin)), hi(lo.size()), run_lo, run_hi;
          mask.fill({begin, end}, lo, hi);
          const std::vector<VisibleRun> runs = mask.visible_runs({begin, end});
          for (const VisibleRun& run : runs) {
            ASSERT_EQ(run.first, std::ssize(run_lo));
            for (int64_t i = 0; i < run.count; ++i) {
              run_lo.push_back(run.lo + i * run.lo_step);
              run_hi.push_back(run.hi + i * run.hi_step);
            }
          }
          ASSERT_EQ(run_lo, lo) << begin << " to " << end;
          ASSERT_EQ(run_hi, hi) << begin << " to " << end;
        }
    }
  // A causal document is one run.
  EXPECT_THAT(IntervalMask({{0, 5}, {5, 24}}, {}).visible_runs({2, 26}),
              ElementsAre(VisibleRun{0, 3, 0, 3, 0, 1}, VisibleRun{3, 19, 5, 6, 0, 1}, VisibleRun{22, 2, 0, 0, 0, 0}));
}

TEST(IntervalMask, AgreesWithTheRulePairByPair) {
  constexpr int64_t kLength = 24;
  for (const auto& documents : document_lists())
    for (const MaskRule& rule : rules()) {
      const IntervalMask mask(documents, rule);
      std::vector<int64_t> lo(kLength - 2, -7), hi(kLength - 2, -7);
      mask.fill({1, kLength - 1}, lo, hi);
      for (int64_t q = 0; q < kLength; ++q) {
        const Span seen = mask.visible(q);
        for (int64_t k = 0; k < kLength; ++k)
          ASSERT_EQ(k >= seen.begin && k < seen.end, may_see(documents, rule, q, k))
              << "query " << q << " key " << k << " window " << rule.window << " prefix " << rule.prefix;
        if (q >= 1 && q < kLength - 1) {
          EXPECT_EQ(lo[static_cast<size_t>(q - 1)], seen.begin);
          EXPECT_EQ(hi[static_cast<size_t>(q - 1)], seen.end);
        }
      }
    }
}

TEST(IntervalMask, CountsAndKindsEqualCounting) {
  constexpr int64_t kLength = 24;
  for (const auto& documents : document_lists())
    for (const MaskRule& rule : rules()) {
      const IntervalMask mask(documents, rule);
      for (int64_t q0 = 0; q0 < kLength; q0 += 3)
        for (int64_t q1 = q0; q1 <= kLength; q1 += 5)
          for (int64_t k0 = 0; k0 < kLength; k0 += 2)
            for (int64_t k1 = k0; k1 <= kLength; k1 += 3) {
              int64_t pairs = 0;
              for (int64_t q = q0; q < q1; ++q)
                for (int64_t k = k0; k < k1; ++k) pairs += may_see(documents, rule, q, k);
              ASSERT_EQ(mask.visible_pairs({q0, q1}, {k0, k1}), pairs)
                  << "queries " << q0 << ".." << q1 << " keys " << k0 << ".." << k1 << " window " << rule.window;
              const BlockKind kind = pairs == 0                       ? BlockKind::skip
                                     : pairs == (q1 - q0) * (k1 - k0) ? BlockKind::plain
                                                                      : BlockKind::masked;
              ASSERT_EQ(mask.classify({q0, q1}, {k0, k1}), kind);
            }
    }
}

TEST(IntervalMask, TheVisibleRangeIsTheSmallestThatHoldsAllThatIsSeen) {
  constexpr int64_t kLength = 24;
  for (const auto& documents : document_lists())
    for (const MaskRule& rule : rules()) {
      const IntervalMask mask(documents, rule);
      for (int64_t q0 = 0; q0 < kLength; ++q0)
        for (int64_t q1 = q0; q1 <= kLength; ++q1) {
          Span seen{kLength, 0};
          for (int64_t q = q0; q < q1; ++q) {
            const Span one = mask.visible(q);
            if (!one.empty()) seen = {std::min(seen.begin, one.begin), std::max(seen.end, one.end)};
          }
          if (seen.empty()) seen = {0, 0};
          ASSERT_EQ(mask.visible_range({q0, q1}), seen) << "queries " << q0 << ".." << q1;
        }
    }
}

TEST(IntervalMask, CausalChunksAreSkippedPlainOrMasked) {
  const IntervalMask mask({{0, 16}}, {});
  EXPECT_EQ(mask.classify({4, 8}, {8, 12}), BlockKind::skip);
  EXPECT_EQ(mask.classify({8, 12}, {4, 8}), BlockKind::plain);
  EXPECT_EQ(mask.classify({4, 8}, {4, 8}), BlockKind::masked);
}

TEST(IntervalMask, B019_PaddingIsNeitherQueryNorKey) {
  const IntervalMask mask({{0, 7}}, {.causal = false});
  EXPECT_EQ(mask.visible(6), (Span{0, 7}));
  EXPECT_EQ(mask.visible(7), (Span{0, 0}));
  EXPECT_EQ(mask.visible_pairs({0, 8}, {0, 8}), 49);
}

TEST(IntervalMask, B020_TheLastTokenOfEveryDocumentIsThere) {
  const IntervalMask mask({{0, 3}, {3, 7}}, {});
  int64_t rows = 0;
  for (int64_t q = 0; q < 8; ++q) rows += !mask.visible(q).empty();
  EXPECT_EQ(rows, 7);
  EXPECT_EQ(mask.visible(6), (Span{3, 7}));
}

TEST(IntervalMask, B022_WindowCrossesChunkEdges) {
  const IntervalMask mask({{0, 16}}, {.window = 4});
  EXPECT_EQ(mask.visible(8), (Span{5, 9}));
  EXPECT_EQ(mask.visible(2), (Span{0, 3}));
}

// Zigzag 200/136, contiguous 72/264: a layout that does not know the documents is not balanced, and does not claim to
// be (balanced does: balanced_layout_test).
TEST(IntervalMask, B037_PairsPerRankOfUnevenDocuments) {
  const IntervalMask mask({{0, 8}, {8, 32}}, {});
  auto pairs = [&](CpLayout policy, int rank) {
    return visible_pairs_of_rank(row_layout(SequenceLayout(policy, 32, 2), mask), mask, rank);
  };
  EXPECT_EQ(pairs(CpLayout::zigzag, 0), 200);
  EXPECT_EQ(pairs(CpLayout::zigzag, 1), 136);
  EXPECT_EQ(pairs(CpLayout::contiguous, 0), 72);
  EXPECT_EQ(pairs(CpLayout::contiguous, 1), 264);
}

TEST(IntervalMask, B039_B040_EveryoneSeesTheSameDocuments) {
  const IntervalMask packed({{0, 6}, {6, 13}}, {});  // padded to 16
  EXPECT_THAT(packed.documents(), ElementsAre(Span{0, 6}, Span{6, 13}));
  for (int64_t q = 13; q < 16; ++q) EXPECT_TRUE(packed.visible(q).empty());

  const IntervalMask slots({{0, 3}, {4, 10}}, {});  // real lengths 3 and 6 in slots that begin at 0 and 4
  EXPECT_TRUE(slots.visible(3).empty());
  EXPECT_EQ(slots.visible(4), (Span{4, 5}));
  EXPECT_EQ(slots.visible_pairs({0, 12}, {3, 4}), 0);
}

TEST(IntervalMask, B120_AttentionIsCountedByVisiblePairs) {
  constexpr int64_t kFlopsPerPair = 4 * 8 * 64;  // two matrix products, 8 heads of size 64
  const IntervalMask one({{0, 4096}}, {});
  EXPECT_EQ(one.visible_pairs({0, 4096}, {0, 4096}) * kFlopsPerPair, 17184063488);
  const IntervalMask four({{0, 1024}, {1024, 2048}, {2048, 3072}, {3072, 4096}}, {});
  EXPECT_EQ(four.visible_pairs({0, 4096}, {0, 4096}) * kFlopsPerPair, 4299161600);
  for (int cp : {2, 3, 8}) {
    const RowLayout layout = SequenceLayout(CpLayout::zigzag, 4096, cp).every_row();
    int64_t pairs = 0;
    for (int r = 0; r < cp; ++r)
      for (int peer = 0; peer < cp; ++peer)
        for (const LocalSpan& queries : layout.spans(r))
          for (const LocalSpan& keys : layout.spans(peer))
            pairs += one.visible_pairs(queries.positions, keys.positions);
    EXPECT_EQ(pairs, 4096 * 4097 / 2) << "cp " << cp;
  }
}

TEST(IntervalMask, LongRowsAreCountedWithoutWalkingThem) {
  constexpr int64_t kLength = int64_t{1} << 30;  // a walk would take seconds per call; a thousand calls must not
  const IntervalMask mask({{0, kLength}}, {.window = 4096});
  for (int i = 0; i < 1000; ++i)
    ASSERT_EQ(mask.visible_pairs({0, kLength}, {0, kLength}), kLength * 4096 - 4096 * int64_t{4095} / 2);
  EXPECT_EQ(mask.visible(kLength - 1), (Span{kLength - 4096, kLength}));
}

TEST(IntervalMask, RefusesWhatIsNotOneInterval) {
  try {
    IntervalMask({{0, 8}}, {.window = 2, .prefix = 2});
    FAIL() << "window with prefix was accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("window (2) and a prefix (2)"));
  }
  EXPECT_THROW(IntervalMask({{0, 8}}, {.window = -1}), ConfigError);
  EXPECT_THROW(IntervalMask({{0, 8}}, {.prefix = -1}), ConfigError);
  EXPECT_THROW(IntervalMask({{0, 5}, {4, 8}}, {}), InternalError);
  EXPECT_THROW(IntervalMask({{4, 8}, {0, 4}}, {}), InternalError);
  EXPECT_THAT(IntervalMask({{0, 4}, {4, 4}, {4, 8}}, {}).documents(), ElementsAre(Span{0, 4}, Span{4, 8}));
}

}  // namespace
}  // namespace farspan
