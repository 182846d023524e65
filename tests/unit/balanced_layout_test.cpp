// SPDX-License-Identifier: Apache-2.0
// cp_layout balanced: equal tokens, visible pairs within kBalance, documents whole where they can be.
#include "parallel/balanced_layout.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "base/philox.h"

namespace farspan {
namespace {

// Documents with log-normal lengths, as packing makes them: one after the other until the row is full, the last one
// cut.
std::vector<Span> packed_documents(std::string_view stream, int64_t seq_length, double median, double spread) {
  const Philox philox(11, stream);
  std::vector<Span> documents;
  int64_t begin = 0;
  for (uint64_t i = 0; begin < seq_length; ++i) {
    const auto length = static_cast<int64_t>(std::ceil(median * std::exp(spread * philox.normal(i))));
    const int64_t end = std::min(seq_length, begin + std::max<int64_t>(1, length));
    documents.push_back({begin, end});
    begin = end;
  }
  return documents;
}

// (largest - smallest) / largest of the ranks' pairs.
double imbalance(const RowLayout& layout, const IntervalMask& mask) {
  std::vector<int64_t> pairs;
  for (int rank = 0; rank < layout.cp(); ++rank) pairs.push_back(visible_pairs_of_rank(layout, mask, rank));
  const auto [least, most] = std::minmax_element(pairs.begin(), pairs.end());
  return *most == 0 ? 0 : static_cast<double>(*most - *least) / static_cast<double>(*most);
}

// Documents on more than one rank.
int64_t cut_documents(const RowLayout& layout, const std::vector<Span>& documents) {
  int64_t cut = 0;
  for (Span document : documents) {
    int owners = 0;
    for (int rank = 0; rank < layout.cp(); ++rank) {
      const auto spans = layout.spans(rank);
      owners += std::any_of(spans.begin(), spans.end(),
                            [&](const LocalSpan& span) { return !intersect(span.positions, document).empty(); });
    }
    cut += owners > 1;
  }
  return cut;
}

TEST(BalancedLayout, RanksHaveEqualTokensAndNearlyEqualPairs) {
  for (int cp : {2, 3, 4, 5, 8, 16})
    for (double median : {16.0, 100.0, 700.0, 5000.0})
      for (double spread : {0.3, 1.0, 2.0})
        for (int64_t window : {0, 64}) {
          const int64_t S = 32768;
          const auto documents = packed_documents(fmt::format("{} {} {}", cp, median, spread), S, median, spread);
          const IntervalMask mask(documents, {.window = window});
          // Construction checks that ranks own equally many tokens, and every token once.
          const RowLayout layout = row_layout(SequenceLayout(CpLayout::balanced, S, cp), mask);
          EXPECT_LE(imbalance(layout, mask), kBalance)
              << "cp " << cp << ", " << documents.size() << " documents, median " << median << " spread " << spread
              << " window " << window;
        }
}

// Zigzag has 200 and 136 pairs here, contiguous 72 and 264.
TEST(BalancedLayout, B037_PairsPerRankOfUnevenDocuments) {
  const IntervalMask mask({{0, 8}, {8, 32}}, {});
  const RowLayout layout = row_layout(SequenceLayout(CpLayout::balanced, 32, 2), mask);
  EXPECT_LE(imbalance(layout, mask), kBalance);
  EXPECT_EQ(visible_pairs_of_rank(layout, mask, 0) + visible_pairs_of_rank(layout, mask, 1), 336);
}

TEST(BalancedLayout, DocumentsStayWholeWhereTheyCan) {
  std::vector<Span> equal;
  for (int64_t d = 0; d < 8; ++d) equal.push_back({100 * d, 100 * (d + 1)});
  const IntervalMask mask(equal, {});
  EXPECT_EQ(cut_documents(row_layout(SequenceLayout(CpLayout::balanced, 800, 4), mask), equal), 0);
  // Nine on four ranks: one must be cut, and one is enough.
  equal.push_back({800, 900});
  const IntervalMask nine(equal, {});
  const RowLayout layout = row_layout(SequenceLayout(CpLayout::balanced, 900, 4), nine);
  EXPECT_EQ(cut_documents(layout, equal), 1);
  EXPECT_LE(imbalance(layout, nine), kBalance);
  // Of many, few are cut.
  const auto many = packed_documents("many", 65536, 100, 1);
  const RowLayout of_many = row_layout(SequenceLayout(CpLayout::balanced, 65536, 4), IntervalMask(many, {}));
  EXPECT_LE(cut_documents(of_many, many), std::ssize(many) / 20) << "of " << many.size();
}

TEST(BalancedLayout, OneDocumentIsAZigzag) {
  const IntervalMask mask({{0, 32}}, {});
  const RowLayout found = row_layout(SequenceLayout(CpLayout::balanced, 32, 4), mask);
  const RowLayout zigzag = SequenceLayout(CpLayout::zigzag, 32, 4).every_row();
  for (int rank = 0; rank < 4; ++rank) EXPECT_TRUE(std::ranges::equal(found.spans(rank), zigzag.spans(rank))) << rank;
}

TEST(BalancedLayout, PaddingAndGapsFillWhatIsLeft) {
  for (int cp : {2, 3, 8})
    for (const std::vector<Span>& documents :
         {std::vector<Span>{}, {{0, 1}}, {{3, 7}, {9, 10}}, {{0, 30}}, {{0, 5}, {5, 31}}}) {
      const IntervalMask mask(documents, {});
      const SequenceLayout layout(CpLayout::balanced, 31, cp, 4);
      EXPECT_EQ(row_layout(layout, mask).local_length(), layout.local_length());
      EXPECT_EQ(layout.local_length() % 4, 0);
    }
}

// Layers with and without a window: what is balanced is their sum.
TEST(BalancedLayout, AllLayersCount) {
  const auto documents = packed_documents("layers", 16384, 300, 1.5);
  const IntervalMask whole(documents, {});
  const IntervalMask windowed(documents, {.window = 32});
  const std::vector<LayerMask> masks = {{&whole, 2}, {&windowed, 22}};
  const RowLayout layout = row_layout(SequenceLayout(CpLayout::balanced, 16384, 8), masks);
  std::vector<int64_t> pairs;
  for (int rank = 0; rank < 8; ++rank)
    pairs.push_back(2 * visible_pairs_of_rank(layout, whole, rank) +
                    22 * visible_pairs_of_rank(layout, windowed, rank));
  const auto [least, most] = std::minmax_element(pairs.begin(), pairs.end());
  EXPECT_LE(static_cast<double>(*most - *least), kBalance * static_cast<double>(*most));
}

// A million tokens in thousands of documents: every rank does this for every row. Milliseconds are meant; a second
// would be a quadratic walk, or a slow machine under a sanitizer.
TEST(BalancedLayout, IsMadeInMilliseconds) {
  const int64_t S = int64_t{1} << 20;
  for (int cp : {8, 64}) {
    const auto documents = packed_documents("long", S, 150, 1.2);
    const IntervalMask mask(documents, {});
    const SequenceLayout layout(CpLayout::balanced, S, cp);
    const auto start = std::chrono::steady_clock::now();
    const RowLayout row = row_layout(layout, mask);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    EXPECT_LE(imbalance(row, mask), kBalance);
    EXPECT_LT(seconds.count(), 1.0);
    RecordProperty(fmt::format("milliseconds_cp{}", cp), std::to_string(seconds.count() * 1e3));
    RecordProperty(fmt::format("documents_cp{}", cp), std::to_string(documents.size()));
  }
}

}  // namespace
}  // namespace farspan
