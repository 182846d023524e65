// SPDX-License-Identifier: Apache-2.0
// World: the ranks of a running job, seen from the process that runs one or more of them. Threads of one process
// (comm/threads) or one rank in each of several processes (comm/mpi); the code that a rank runs cannot tell which.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "device/device.h"

namespace farspan {

class World {
 public:
  virtual ~World() = default;

  virtual int size() const = 0;
  // The lowest of the ranks that this process runs: what is done once in a process is done by it.
  virtual int first_local_rank() const = 0;

  // The calling rank's end of the group `ranks` (world ranks, group order; must hold `world_rank`). Every member must
  // make the same groups in the same order. Groups of one rank are allowed: their collectives are local. The
  // communicator must outlive its Works; calls of one group may be waited for in any order. Throws InternalError on bad
  // ranks.
  virtual std::unique_ptr<Communicator> group(int world_rank, std::vector<int> ranks, Dimension dimension) = 0;
  // The same for tensors that lie in the memory of `device`, the rank's own, which must outlive the communicator. All
  // members have devices of the same kind. Throws ConfigError where the backend cannot carry messages between the
  // members' GPUs.
  virtual std::unique_ptr<Communicator> group(int world_rank, std::vector<int> ranks, Dimension dimension,
                                              Device& device) = 0;

  // Which of the GPUs that its process sees a rank computes on; ranks take turns. Throws ConfigError without a GPU.
  virtual int gpu_of(int world_rank) const = 0;

  // Where a rank of this process is, for reports: "step 3, layer 5 backward". Cheap; set by the training loop.
  virtual void set_position(int world_rank, std::string position) = 0;

  // Ends the job: every present and future wait throws. The first call's reason is the one reported.
  virtual void abort(int world_rank, const std::string& reason) = 0;
  virtual bool aborted() const = 0;

  // One text of the ranks' last operations: who waits in what, who is missing from which collective, step and layer.
  // Among processes rank 0 sees all ranks, every other rank itself.
  virtual std::string report() const = 0;

 protected:
  // The number of the rank's GPU where `place` ranks of this process's machine come before it.
  static int gpu_of_place(int place);
  // The place of `world_rank` in `ranks`; throws InternalError where they are no group of this world.
  int place_in_group(int world_rank, const std::vector<int>& ranks, Dimension dimension) const;
};

// What each rank of a job does.
using RankBody = std::function<void(int rank, World& world)>;

}  // namespace farspan
