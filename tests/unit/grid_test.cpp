// SPDX-License-Identifier: Apache-2.0
#include "parallel/grid.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <numeric>
#include <set>
#include <string>
#include <vector>

namespace farspan {
namespace {

using Groups = std::vector<std::vector<int>>;

constexpr Dimension kAxes[] = {Dimension::tp, Dimension::cp, Dimension::dp, Dimension::pp};
constexpr Dimension kAll[] = {Dimension::tp, Dimension::cp,    Dimension::dp,
                              Dimension::pp, Dimension::dp_cp, Dimension::world};

int along(const GridSizes& sizes, Dimension axis) {
  switch (axis) {
    case Dimension::tp:
      return sizes.tp;
    case Dimension::cp:
      return sizes.cp;
    case Dimension::dp:
      return sizes.dp;
    case Dimension::pp:
      return sizes.pp;
    case Dimension::dp_cp:
      return sizes.dp * sizes.cp;
    case Dimension::world:
      return sizes.world();
  }
  return 0;
}

TEST(Grid, TensorPeersAreNeighboursAndContextPeersAreTpApart) {
  const Grid grid({.tp = 2, .cp = 4}, "tp-cp-dp-pp");
  EXPECT_EQ(grid.groups(Dimension::tp), (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(grid.groups(Dimension::cp), (Groups{{0, 2, 4, 6}, {1, 3, 5, 7}}));
  EXPECT_EQ(grid.groups(Dimension::dp), (Groups{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}}));
  EXPECT_EQ(grid.groups(Dimension::dp_cp), grid.groups(Dimension::cp));
  EXPECT_EQ(grid.groups(Dimension::world), (Groups{{0, 1, 2, 3, 4, 5, 6, 7}}));
}

// rank = tp + 4 (cp + 4 (dp + 2 pp)): strides 1, 4, 16, 32.
TEST(Grid, SixtyFourRanksByHand) {
  const Grid grid({.tp = 4, .cp = 4, .dp = 2, .pp = 2}, "tp-cp-dp-pp");
  EXPECT_EQ(grid.group_of(38, Dimension::tp), (std::vector<int>{36, 37, 38, 39}));
  EXPECT_EQ(grid.group_of(38, Dimension::cp), (std::vector<int>{34, 38, 42, 46}));
  EXPECT_EQ(grid.group_of(38, Dimension::dp), (std::vector<int>{38, 54}));
  EXPECT_EQ(grid.group_of(38, Dimension::pp), (std::vector<int>{6, 38}));
  EXPECT_EQ(grid.group_of(38, Dimension::dp_cp), (std::vector<int>{34, 38, 42, 46, 50, 54, 58, 62}));
  EXPECT_EQ(grid.groups(Dimension::pp).size(), 32u);
  EXPECT_EQ(grid.coordinate(38, Dimension::tp), 2);
  EXPECT_EQ(grid.coordinate(38, Dimension::cp), 1);
  EXPECT_EQ(grid.coordinate(38, Dimension::dp), 0);
  EXPECT_EQ(grid.coordinate(38, Dimension::pp), 1);
}

TEST(Grid, AnotherOrderMovesTheStrides) {
  const Grid grid({.tp = 2, .cp = 2, .dp = 1, .pp = 2}, "cp-pp-dp-tp");
  EXPECT_EQ(grid.groups(Dimension::cp), (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(grid.groups(Dimension::pp), (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
  EXPECT_EQ(grid.groups(Dimension::tp), (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
}

TEST(Grid, EveryOrderPartitionsTheRanks) {
  const GridSizes sizes{.tp = 2, .cp = 3, .dp = 2, .pp = 2};
  std::vector<std::string> names = {"cp", "dp", "pp", "tp"};
  int orders = 0;
  do {
    const std::string order = names[0] + "-" + names[1] + "-" + names[2] + "-" + names[3];
    SCOPED_TRACE(order);
    ++orders;
    const Grid grid(sizes, order);
    for (Dimension dimension : kAll) {
      SCOPED_TRACE(std::string(name_of(dimension)));
      std::vector<int> seen;
      int last_first = -1;
      for (const std::vector<int>& group : grid.groups(dimension)) {
        EXPECT_EQ(static_cast<int>(group.size()), along(sizes, dimension));
        EXPECT_TRUE(std::is_sorted(group.begin(), group.end()));
        EXPECT_GT(group.front(), last_first);
        last_first = group.front();
        for (int rank : group) {
          EXPECT_EQ(grid.group_of(rank, dimension), group);
          EXPECT_EQ(grid.ends_of_group(rank, dimension), std::pair(group.front(), group.back()));
        }
        seen.insert(seen.end(), group.begin(), group.end());
      }
      std::sort(seen.begin(), seen.end());
      std::vector<int> every(static_cast<size_t>(sizes.world()));
      std::iota(every.begin(), every.end(), 0);
      EXPECT_EQ(seen, every);
    }
    // Within a group of one axis the coordinate counts up and the other three stay.
    for (Dimension axis : kAxes)
      for (const std::vector<int>& group : grid.groups(axis))
        for (size_t i = 0; i < group.size(); ++i)
          for (Dimension other : kAxes)
            EXPECT_EQ(grid.coordinate(group[i], other),
                      other == axis ? static_cast<int>(i) : grid.coordinate(group[0], other));
    std::set<std::vector<int>> coordinates;
    for (int rank = 0; rank < sizes.world(); ++rank)
      coordinates.insert({grid.coordinate(rank, Dimension::tp), grid.coordinate(rank, Dimension::cp),
                          grid.coordinate(rank, Dimension::dp), grid.coordinate(rank, Dimension::pp)});
    EXPECT_EQ(static_cast<int>(coordinates.size()), sizes.world());
  } while (std::next_permutation(names.begin(), names.end()));
  EXPECT_EQ(orders, 24);
}

// Each rank asks for its own groups, so their cost must not grow with the world.
TEST(Grid, LargeWorldsTakeNoLongerThanTheirSize) {
  const Grid grid({.tp = 8, .cp = 32, .dp = 64, .pp = 4}, "tp-cp-dp-pp");
  int64_t members = 0;
  for (int rank = 0; rank < grid.sizes().world(); ++rank)
    for (Dimension axis : kAxes) members += std::ssize(grid.group_of(rank, axis));
  EXPECT_EQ(members, int64_t{65536} * (8 + 32 + 64 + 4));
  EXPECT_EQ(grid.groups(Dimension::dp_cp).size(), 32u);
  EXPECT_EQ(grid.groups(Dimension::dp_cp)[31].back(), 65535);
}

TEST(Grid, BadOrdersAreConfigErrors) {
  for (const char* order : {"", "tp", "tp-cp-dp", "tp-cp-dp-dp", "tp-cp-dp-pp-tp", "tp-cp-dp-ep", "tp-cp-dp-world",
                            "tp-cp-dp-pp-", "-tp-cp-dp-pp", "tp,cp,dp,pp", "TP-cp-dp-pp", "tp cp dp pp"}) {
    SCOPED_TRACE(order);
    try {
      Grid({}, order);
      ADD_FAILURE() << "accepted";
    } catch (const ConfigError& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("\"" + std::string(order) + "\""), std::string::npos) << message;
      EXPECT_NE(message.find("tp-cp-dp-pp"), std::string::npos) << message;
    }
  }
}

TEST(Grid, BadSizesAreConfigErrors) {
  EXPECT_THROW(Grid({.tp = 0}, "tp-cp-dp-pp"), ConfigError);
  EXPECT_THROW(Grid({.pp = -2}, "tp-cp-dp-pp"), ConfigError);
  EXPECT_THROW(Grid({.tp = 65536, .cp = 65536}, "tp-cp-dp-pp"), ConfigError);
}

TEST(Grid, RanksOutsideAreInternalErrors) {
  const Grid grid({.tp = 2}, "tp-cp-dp-pp");
  EXPECT_THROW(grid.coordinate(2, Dimension::tp), InternalError);
  EXPECT_THROW(grid.coordinate(-1, Dimension::tp), InternalError);
  EXPECT_THROW(grid.coordinate(0, Dimension::dp_cp), InternalError);
  EXPECT_THROW(grid.group_of(2, Dimension::tp), InternalError);
}

}  // namespace
}  // namespace farspan
