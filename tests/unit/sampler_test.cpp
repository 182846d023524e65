// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <numeric>
#include <set>

#include "base/error.h"
#include "data/dataset.h"
#include "parallel/grid.h"

namespace farspan {
namespace {

std::vector<int64_t> epoch_order(const Sampler& sampler, int64_t rows, int64_t epoch) {
  std::vector<int64_t> order;
  for (int64_t i = 0; i < rows; ++i) order.push_back(sampler.row_of(epoch * rows + i));
  return order;
}

TEST(Sampler, EveryEpochHoldsEveryRowOnce) {
  for (int64_t rows : {1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097}) {
    const Sampler sampler(rows, 1234, true);
    for (int64_t epoch : {0, 1, 7}) {
      std::vector<int64_t> order = epoch_order(sampler, rows, epoch);
      std::sort(order.begin(), order.end());
      std::vector<int64_t> all(static_cast<size_t>(rows));
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(order, all) << rows << " rows, epoch " << epoch;
    }
  }
}

TEST(Sampler, WithoutShuffleRowsComeInOrder) {
  const Sampler sampler(5, 1234, false);
  EXPECT_THAT(epoch_order(sampler, 5, 0), ::testing::ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(epoch_order(sampler, 5, 3), ::testing::ElementsAre(0, 1, 2, 3, 4));
}

TEST(Sampler, OrderDependsOnSeedAndEpoch) {
  const std::vector<int64_t> first = epoch_order(Sampler(100, 1, true), 100, 0);
  EXPECT_EQ(first, epoch_order(Sampler(100, 1, true), 100, 0));
  EXPECT_NE(first, epoch_order(Sampler(100, 1, true), 100, 1));
  EXPECT_NE(first, epoch_order(Sampler(100, 2, true), 100, 0));
}

// Over many epochs each of the 24 orders of 4 rows, and each row in each place of 10, comes about equally often. Counts
// of n trials with probability p scatter by sqrt(n p (1 - p)); five of those leaves a chance below 1e-4 for all places.
TEST(Sampler, OrdersAreEvenlySpread) {
  constexpr int64_t kEpochs = 12000;
  std::map<std::vector<int64_t>, int64_t> orders;
  const Sampler four(4, 7, true);
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) ++orders[epoch_order(four, 4, epoch)];
  ASSERT_EQ(orders.size(), 24u);
  for (const auto& [order, count] : orders)
    EXPECT_NEAR(static_cast<double>(count), 500, 5 * 21.9) << ::testing::PrintToString(order);

  std::vector<int64_t> places(100);
  const Sampler ten(10, 7, true);
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch)
    for (int64_t i = 0; i < 10; ++i) ++places[static_cast<size_t>(10 * i + ten.row_of(epoch * 10 + i))];
  for (int64_t count : places) EXPECT_NEAR(static_cast<double>(count), 1200, 5 * 32.9);
}

TEST(Sampler, B088_WrapsWithEpochs) {
  const Sampler sampler(5, 1234, true);
  EXPECT_EQ(sampler.epoch_of(4), 0);
  EXPECT_EQ(sampler.epoch_of(5), 1);
  EXPECT_EQ(sampler.epoch_of(11), 2);
  for (int64_t sample = 0; sample < 12; ++sample) {
    EXPECT_GE(sampler.row_of(sample), 0);
    EXPECT_LT(sampler.row_of(sample), 5);
  }
}

// Sample numbers of a step: rows of one data-parallel rank side by side. Nothing but the dp coordinate enters.
TEST(Sampler, B089_RanksOfOneCpGroupSeeTheSameSamples) {
  for (const GridSizes sizes : {GridSizes{1, 2, 2, 1}, GridSizes{2, 2, 2, 2}}) {
    const Grid grid(sizes, "tp-cp-dp-pp");
    constexpr int64_t kRowsPerRank = 3;
    std::vector<std::vector<int64_t>> seen(static_cast<size_t>(sizes.world()));
    for (int rank = 0; rank < sizes.world(); ++rank) {
      const Sampler sampler(40, 1234, true);  // each rank its own, as in training
      const int64_t dp = grid.coordinate(rank, Dimension::dp);
      for (int64_t step = 0; step < 3; ++step)
        for (int64_t i = 0; i < kRowsPerRank; ++i)
          seen[static_cast<size_t>(rank)].push_back(sampler.row_of((step * sizes.dp + dp) * kRowsPerRank + i));
    }
    for (Dimension shared : {Dimension::cp, Dimension::tp, Dimension::pp})
      for (const std::vector<int>& group : grid.groups(shared))
        for (int rank : group) EXPECT_EQ(seen[static_cast<size_t>(rank)], seen[static_cast<size_t>(group[0])]);
    for (const std::vector<int>& group : grid.groups(Dimension::dp)) {
      std::set<int64_t> rows;
      for (int rank : group)
        rows.insert(seen[static_cast<size_t>(rank)].begin(), seen[static_cast<size_t>(rank)].end());
      EXPECT_EQ(rows.size(), static_cast<size_t>(sizes.dp) * 3 * kRowsPerRank);
    }
  }
}

// The order is a function of the sample number alone, so going on from any number equals never having stopped.
TEST(Sampler, B081_ResumingGoesOnWhereItStopped) {
  const Sampler unbroken(9, 1234, true);
  for (int64_t stop = 0; stop < 20; ++stop) {
    const Sampler resumed(9, 1234, true);
    for (int64_t sample = stop; sample < 20; ++sample) EXPECT_EQ(resumed.row_of(sample), unbroken.row_of(sample));
  }
}

TEST(Sampler, HugeRowCountsCostNothing) {
  constexpr int64_t kRows = int64_t{1} << 40;
  const Sampler sampler(kRows, 1234, true);
  std::set<int64_t> rows;
  for (int64_t sample = 0; sample < 1000; ++sample) {
    const int64_t row = sampler.row_of(3 * kRows + sample);
    EXPECT_GE(row, 0);
    EXPECT_LT(row, kRows);
    rows.insert(row);
  }
  EXPECT_EQ(rows.size(), 1000u);
  EXPECT_GT(*rows.rbegin(), int64_t{1} << 32);
}

TEST(Sampler, NeedsRows) { EXPECT_THROW(Sampler(0, 1234, true), InternalError); }

}  // namespace
}  // namespace farspan
