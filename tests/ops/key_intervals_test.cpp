// SPDX-License-Identifier: Apache-2.0
#include "ops/key_intervals.h"

#include <algorithm>
#include <gtest/gtest.h>

#include "tests/device.h"
#include "tests/ops/operand.h"

namespace farspan {
namespace {

// One after the other, what an interval of positions holds of some pieces.
TEST(KeyIntervals, CountsThePiecesKeysBeforeAPosition) {
  const std::vector<std::vector<KeyPiece>> cases = {
      {{0, 100}}, {{7, 3}}, {{4, 4}, {8, 1}, {20, 0}, {31, 60}}, {{50, 10}, {90, 10}}};
  Device device(test::test_device_kind(), 1);
  for (const std::vector<KeyPiece>& pieces : cases) {
    constexpr int64_t kPositions = 101;
    test::TestVector<int64_t> lo(kPositions), hi(kPositions), key_lo(kPositions, -1), key_hi(kPositions, -1);
    for (int64_t i = 0; i < kPositions; ++i) lo[static_cast<size_t>(i)] = i, hi[static_cast<size_t>(i)] = 100 - i;
    const auto tensor = [](test::TestVector<int64_t>& x) {
      return Tensor(x.data(), DType::i64, Shape{static_cast<int64_t>(x.size())});
    };
    const std::vector<QueryRange> ranges = {{0, 30}, {40, 40}, {41, 90}, {95, 101}};
    const auto looked_at = [&](int64_t query) {
      return std::any_of(ranges.begin(), ranges.end(),
                         [&](const QueryRange& range) { return query >= range.begin && query < range.end; });
    };
    key_intervals(device, pieces, ranges, tensor(lo), tensor(hi), tensor(key_lo), tensor(key_hi));
    device.synchronize();
    const auto before = [&](int64_t position) {
      int64_t keys = 0;
      for (const KeyPiece& piece : pieces)
        for (int64_t p = piece.begin; p < piece.end(); ++p) keys += p < position;
      return keys;
    };
    for (int64_t i = 0; i < kPositions; ++i) {
      EXPECT_EQ(key_lo[static_cast<size_t>(i)], looked_at(i) ? before(i) : 0);
      EXPECT_EQ(key_hi[static_cast<size_t>(i)], looked_at(i) ? before(100 - i) : 0);
    }
  }
}

TEST(KeyIntervals, RefusesPiecesThatDoNotAscend) {
  Device device(test::test_device_kind(), 1);
  const Tensor none(nullptr, DType::i64, Shape{0});
  const std::vector<QueryRange> queries = {{0, 1}};
  EXPECT_THROW(key_intervals(device, {}, queries, none, none, none, none), InternalError);
  const std::vector<KeyPiece> backwards = {{10, 5}, {0, 5}};
  EXPECT_THROW(key_intervals(device, backwards, queries, none, none, none, none), InternalError);
  const std::vector<KeyPiece> pieces = {{0, 5}};
  EXPECT_THROW(key_intervals(device, pieces, {}, none, none, none, none), InternalError);
  const std::vector<QueryRange> crossing = {{0, 5}, {4, 8}};
  EXPECT_THROW(key_intervals(device, pieces, crossing, none, none, none, none), InternalError);
}

}  // namespace
}  // namespace farspan
