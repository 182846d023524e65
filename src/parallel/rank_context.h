// SPDX-License-Identifier: Apache-2.0
// Everything a rank owns that is not the model: passed down, never global.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "device/device.h"
#include "memory/arena.h"
#include "parallel/grid.h"

namespace farspan {

struct RankContext {
  int rank = 0;  // in the world
  const Grid* grid = nullptr;
  Device* device = nullptr;
  Arena* arena = nullptr;
  // One communicator per dimension, indexed by it.
  std::array<std::unique_ptr<Communicator>, kDimensions> groups;

  Communicator& group(Dimension dimension) const { return *groups[static_cast<size_t>(dimension)]; }
  int coordinate(Dimension axis) const { return grid->coordinate(rank, axis); }
};

// Makes the rank's communicator of every dimension, always in the order of the enum, so that all ranks agree.
using GroupMaker = std::function<std::unique_ptr<Communicator>(std::vector<int> ranks, Dimension dimension)>;
void make_groups(RankContext& context, const GroupMaker& make);

}  // namespace farspan
