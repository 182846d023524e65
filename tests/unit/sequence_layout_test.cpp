// SPDX-License-Identifier: Apache-2.0
// Who owns which tokens of a row, and that all per-token arrays are dealt alike.
#include "parallel/sequence_layout.h"

#include <algorithm>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "parallel/deal.h"

namespace farspan {
namespace {

using ::testing::ElementsAre;

std::vector<int64_t> local_positions(const RowLayout& layout, int rank) {
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < layout.local_length(); ++i) positions.push_back(layout.position(rank, i));
  return positions;
}

RowLayout every_row(CpLayout policy, int64_t seq_length, int cp, int64_t multiple = 1) {
  return SequenceLayout(policy, seq_length, cp, multiple).every_row();
}

std::vector<int64_t> dealt_positions(const RowLayout& layout, int rank, std::vector<Span> documents, bool restart,
                                     int64_t first = 0) {
  std::vector<int64_t> positions(static_cast<size_t>(layout.local_length()), -7);
  deal_positions(layout, rank, documents, restart, positions, first);
  return positions;
}

// Every padded position is owned exactly once, spans ascend without touching, and position() agrees with spans().
void expect_partition(const RowLayout& layout, int64_t padded_length) {
  ASSERT_EQ(layout.local_length() * layout.cp(), padded_length);
  std::vector<int> owners(static_cast<size_t>(padded_length), 0);
  for (int rank = 0; rank < layout.cp(); ++rank) {
    int64_t last = -2;
    int64_t i = 0;
    for (const LocalSpan& span : layout.spans(rank)) {
      EXPECT_GT(span.positions.begin, last + 1) << "two spans that touch";
      EXPECT_EQ(span.local_begin, i);
      for (int64_t q = span.positions.begin; q < span.positions.end; ++q, ++i) {
        ++owners[static_cast<size_t>(q)];
        EXPECT_EQ(layout.position(rank, i), q);
      }
      last = span.positions.end - 1;
    }
    EXPECT_EQ(i, layout.local_length());
  }
  EXPECT_THAT(owners, ::testing::Each(1));
}

void expect_partition(CpLayout policy, int64_t seq_length, int cp, int64_t multiple = 1) {
  SCOPED_TRACE(fmt::format("policy {} S {} cp {} multiple {}", static_cast<int>(policy), seq_length, cp, multiple));
  const SequenceLayout layout(policy, seq_length, cp, multiple);
  EXPECT_EQ(layout.chunk_length() * layout.chunks_per_rank(), layout.local_length());
  EXPECT_EQ(layout.local_length() % multiple, 0);
  EXPECT_GE(layout.padded_length(), seq_length);
  const int64_t step = std::lcm(multiple, int64_t{layout.chunks_per_rank()});
  EXPECT_LT(layout.local_length() - step, (seq_length + cp - 1) / cp) << "more padding than needed";
  expect_partition(layout.every_row(), layout.padded_length());
}

TEST(SequenceLayout, EveryPositionHasOneOwner) {
  for (CpLayout policy : {CpLayout::zigzag, CpLayout::contiguous})
    for (int cp : {1, 2, 3, 4, 5, 8})
      for (int64_t seq_length : {1, 2, 7, 8, 10, 16, 33, 97})
        for (int64_t multiple : {1, 2, 3, 4, 8}) expect_partition(policy, seq_length, cp, multiple);
}

TEST(SequenceLayout, B001_LengthsThatDoNotDivideArePadded) {
  EXPECT_EQ(SequenceLayout(CpLayout::zigzag, 10, 4).padded_length(), 16);
  EXPECT_EQ(SequenceLayout(CpLayout::zigzag, 2999, 4).padded_length(), 3000);
  EXPECT_EQ(SequenceLayout(CpLayout::zigzag, 4097, 8).padded_length(), 4112);
  for (auto [seq_length, cp] : {std::pair<int64_t, int>{10, 4}, {2999, 4}, {4097, 8}})
    expect_partition(CpLayout::zigzag, seq_length, cp);
}

TEST(SequenceLayout, B002_FewerTokensThanRanksAreAllOwned) {
  for (int64_t seq_length : {2, 10}) {
    const RowLayout layout = every_row(CpLayout::contiguous, seq_length, 3);
    int64_t real = 0;
    for (int rank = 0; rank < 3; ++rank)
      for (int64_t q : local_positions(layout, rank)) real += q < seq_length;
    EXPECT_EQ(real, seq_length);
  }
}

TEST(SequenceLayout, B003_OddMultipleOfCpIsPaddedByZigzagAlone) {
  EXPECT_EQ(SequenceLayout(CpLayout::contiguous, 12, 4).padded_length(), 12);
  EXPECT_EQ(SequenceLayout(CpLayout::zigzag, 12, 4).padded_length(), 16);
}

TEST(SequenceLayout, B004_ChunksOfOneToken) {
  const RowLayout layout = every_row(CpLayout::zigzag, 4, 2);
  EXPECT_THAT(local_positions(layout, 0), ElementsAre(0, 3));
  EXPECT_THAT(local_positions(layout, 1), ElementsAre(1, 2));
}

TEST(SequenceLayout, B031_AnOddLengthIsPaddedLast) {
  EXPECT_EQ(SequenceLayout(CpLayout::contiguous, 9, 2).padded_length(), 10);
  EXPECT_EQ(SequenceLayout(CpLayout::zigzag, 9, 2).padded_length(), 12);
  EXPECT_THAT(local_positions(every_row(CpLayout::zigzag, 9, 2), 0), ElementsAre(0, 1, 2, 9, 10, 11));
}

TEST(SequenceLayout, OneRankOwnsTheRowUnpadded) {
  for (CpLayout policy : {CpLayout::zigzag, CpLayout::contiguous, CpLayout::balanced}) {
    const SequenceLayout layout(policy, 7, 1);
    EXPECT_EQ(layout.chunks_per_rank(), 1);
    EXPECT_EQ(layout.padded_length(), 7);
    EXPECT_THAT(layout.every_row().spans(0), ElementsAre(LocalSpan{{0, 7}, 0}));
  }
}

TEST(SequenceLayout, WhatIsNotALayoutIsRefused) {
  EXPECT_THROW(SequenceLayout(CpLayout::zigzag, 0, 2), ConfigError);
  EXPECT_THROW(SequenceLayout(CpLayout::zigzag, 8, 0), ConfigError);
  EXPECT_THROW(SequenceLayout(CpLayout::zigzag, 8, 2, 0), ConfigError);
  EXPECT_THROW(SequenceLayout(CpLayout::balanced, 8, 2).every_row(), InternalError) << "rows differ";
}

TEST(RowLayout, SpansThatTouchAreOne) {
  const RowLayout layout({{{4, 6}, {0, 2}, {2, 3}}, {{3, 4}, {6, 10}}});
  EXPECT_THAT(layout.spans(0), ElementsAre(LocalSpan{{0, 3}, 0}, LocalSpan{{4, 6}, 3}));
  EXPECT_EQ(layout.position(0, 3), 4);
  EXPECT_EQ(layout.position(1, 1), 6);
}

TEST(RowLayout, UnequalSharesAndHolesAreBugs) {
  EXPECT_THROW(RowLayout({{{0, 3}}, {{3, 5}}}), InternalError);
  EXPECT_THROW(RowLayout({{{0, 2}}, {{3, 5}}}), InternalError);
  EXPECT_THROW(RowLayout({{{0, 2}}, {{1, 3}}}), InternalError);
}

TEST(RowLayout, NeighboursTogetherOwnALargerZigzag) {
  const RowLayout merged = merge_ranks(every_row(CpLayout::zigzag, 32, 8), 2);
  const RowLayout wide = every_row(CpLayout::zigzag, 32, 4);
  for (int rank = 0; rank < 4; ++rank) EXPECT_TRUE(std::ranges::equal(merged.spans(rank), wide.spans(rank))) << rank;
}

TEST(Deal, B047_PositionsFollowTheTokens) {
  const RowLayout layout = every_row(CpLayout::zigzag, 8, 2);
  EXPECT_THAT(dealt_positions(layout, 0, {{0, 8}}, false), ElementsAre(0, 1, 6, 7));
  EXPECT_THAT(dealt_positions(layout, 1, {{0, 8}}, false), ElementsAre(2, 3, 4, 5));
}

// The case's per-document cut does not exist here; the rule (positions by document, dealt as tokens are) is the same.
TEST(Deal, B048_PositionsRestartPerDocumentWhereverTheTokenLands) {
  const RowLayout layout = every_row(CpLayout::zigzag, 8, 2);
  EXPECT_THAT(dealt_positions(layout, 0, {{0, 4}, {4, 8}}, true), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(dealt_positions(layout, 1, {{0, 4}, {4, 8}}, true), ElementsAre(2, 3, 0, 1));
  EXPECT_THAT(dealt_positions(layout, 0, {{0, 4}, {4, 8}}, false), ElementsAre(0, 1, 6, 7));
}

TEST(Deal, B052_ExplicitPositionsAreDealtLikeTokens) {
  const RowLayout layout = every_row(CpLayout::zigzag, 8, 2);
  EXPECT_THAT(dealt_positions(layout, 0, {{0, 8}}, false, 100), ElementsAre(100, 101, 106, 107));
  std::vector<int64_t> row(8);
  std::iota(row.begin(), row.end(), 100);
  std::vector<int64_t> local(4);
  deal_values<int64_t>(layout, 0, row, -1, local);
  EXPECT_THAT(local, ElementsAre(100, 101, 106, 107));
}

TEST(Deal, PaddingGetsPositionZeroAndThePadValue) {
  const RowLayout layout = every_row(CpLayout::zigzag, 10, 4);  // padded to 16
  EXPECT_THAT(dealt_positions(layout, 0, {{0, 10}}, false), ElementsAre(0, 1, 0, 0));
  EXPECT_THAT(dealt_positions(layout, 3, {{0, 3}, {3, 10}}, true), ElementsAre(3, 4, 5, 6));
  const std::vector<int32_t> row = {10, 11, 12, 13, 14, 15, 16, 17, 18, 19};
  std::vector<int32_t> local(4);
  deal_values<int32_t>(layout, 1, row, -1, local);
  EXPECT_THAT(local, ElementsAre(12, 13, -1, -1));
}

TEST(Deal, TokenIndexNumbersTheTokensOfTheData) {
  const RowLayout layout = every_row(CpLayout::zigzag, 10, 4);
  std::vector<int64_t> index(4);
  deal_token_index(layout, 1, 3, 10, index);
  EXPECT_THAT(index, ElementsAre(32, 33, 39, 39)) << "padding: the row's last";
}

TEST(Deal, MaskAndPositionsMeetTheSameTokens) {
  const std::vector<Span> documents = {{0, 5}, {5, 6}, {6, 17}};
  const IntervalMask mask(documents, {});
  for (CpLayout policy : {CpLayout::zigzag, CpLayout::contiguous}) {
    const RowLayout layout = every_row(policy, 17, 4);
    for (int rank = 0; rank < 4; ++rank) {
      const auto s = static_cast<size_t>(layout.local_length());
      std::vector<int64_t> lo(s, -7), hi(s, -7);
      deal_mask(layout, rank, mask, lo, hi);
      const auto restarted = dealt_positions(layout, rank, documents, true);
      for (size_t i = 0; i < s; ++i) {
        const int64_t q = layout.position(rank, static_cast<int64_t>(i));
        EXPECT_EQ((Span{lo[i], hi[i]}), mask.visible(q)) << "position " << q;
        if (q >= 17) continue;  // padding
        EXPECT_EQ(q - lo[i], restarted[i]) << "causal: lo is the document's first token; position " << q;
      }
    }
  }
}

TEST(Deal, B036_DocumentBoundsAreTheirOwnNotTheRows) {
  const std::vector<Span> documents = {{0, 6}, {6, 8}, {8, 16}};
  const RowLayout layout = every_row(CpLayout::contiguous, 16, 1);
  const auto positions = dealt_positions(layout, 0, documents, true);
  EXPECT_EQ(*std::max_element(positions.begin(), positions.end()) + 1, 8) << "longest document";
  EXPECT_THAT(positions, ElementsAre(0, 1, 2, 3, 4, 5, 0, 1, 0, 1, 2, 3, 4, 5, 6, 7));
}

}  // namespace
}  // namespace farspan
