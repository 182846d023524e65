// SPDX-License-Identifier: Apache-2.0
// Which rank is in which group. Megatron-LM's order: in "tp-cp-dp-pp" the first axis varies fastest, so tensor-parallel
// peers are neighbours and context-parallel peers are tp apart.
// Source: Megatron-LM core/parallel_state.py, RankGenerator (order, orthogonal groups).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"

namespace farspan {

struct GridSizes {
  int tp = 1;
  int cp = 1;
  int dp = 1;
  int pp = 1;
  int world() const { return tp * cp * dp * pp; }
};

class Grid {
 public:
  // `order`: the four names tp, cp, dp, pp in some order, joined by dashes, fastest first. Throws ConfigError
  // otherwise.
  Grid(GridSizes sizes, const std::string& order);

  const GridSizes& sizes() const { return sizes_; }

  // All groups of one dimension, in time proportional to the world, each in rank order, ascending by first rank. dp_cp
  // varies dp and cp; world is one group.
  std::vector<std::vector<int>> groups(Dimension dimension) const;
  // The group that holds `rank`, in time proportional to its size.
  std::vector<int> group_of(int rank, Dimension dimension) const;
  // The first and the last rank of that group.
  std::pair<int, int> ends_of_group(int rank, Dimension dimension) const;
  // Coordinate of a rank on one axis (tp, cp, dp or pp).
  int coordinate(int rank, Dimension axis) const;

 private:
  int first_of_group(int rank, Dimension dimension) const;

  GridSizes sizes_;
  std::vector<Dimension> order_;  // fastest first
};

}  // namespace farspan
