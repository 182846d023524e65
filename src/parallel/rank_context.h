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

// Makes the calling rank's end of a group; `ranks` are world ranks in group order.
using GroupMaker = std::function<std::unique_ptr<Communicator>(std::vector<int> ranks, Dimension dimension)>;

struct RankContext {
  RankContext(int world_rank, const Grid& rank_grid, Device& rank_device, Arena& rank_arena)
      : rank(world_rank), grid(&rank_grid), device(&rank_device), arena(&rank_arena) {}

  int rank = 0;  // in the world
  const Grid* grid = nullptr;
  Device* device = nullptr;
  Arena* arena = nullptr;
  // One communicator per dimension, indexed by it.
  std::array<std::unique_ptr<Communicator>, kDimensions> groups;
  // Further groups (pipeline links, parts of a context-parallel group).
  std::vector<std::unique_ptr<Communicator>> more_groups;
  GroupMaker make_group;
  OpObserver* op_observer = nullptr;  // of the device, as observe_ops has set it

  Communicator& group(Dimension dimension) const { return *groups[static_cast<size_t>(dimension)]; }
  // Makes a further group, which lives as long as this. All members make theirs in the same order.
  Communicator& add_group(std::vector<int> ranks, Dimension dimension);
  // What the rank has moved in all groups of a dimension.
  Traffic traffic(Dimension dimension) const;
  void reset_traffic();
  // Shows an observer the device's ops; null ends it.
  void observe_ops(OpObserver* observer);
  // Shows an observer the calls of every group; null ends it.
  void observe_calls(CallObserver* observer) const;
  int coordinate(Dimension axis) const { return grid->coordinate(rank, axis); }
};

// Makes the rank's communicator of every dimension, always in the order of the enum, so that all ranks agree, and keeps
// `make` for further groups.
void make_groups(RankContext& context, GroupMaker make);

}  // namespace farspan
