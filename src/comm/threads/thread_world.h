// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process. Messages are copied straight from the sender's memory into the receiver's: no staging
// buffers, so what the arena planned is all there is.
#pragma once

#include <functional>
#include <memory>

#include "comm/communicator.h"

namespace farspan {

class ThreadWorld {
 public:
  // `timeout_seconds`: how long any wait may last before it becomes an error that names the missing ranks.
  ThreadWorld(int size, double timeout_seconds);
  ~ThreadWorld();
  ThreadWorld(const ThreadWorld&) = delete;
  ThreadWorld& operator=(const ThreadWorld&) = delete;

  int size() const;

  // The calling rank's end of the group `ranks` (world ranks, group order; must hold `world_rank`). Every member must make
  // the same groups in the same order. Groups of one rank are allowed: their collectives are local.
  std::unique_ptr<Communicator> group(int world_rank, std::vector<int> ranks, Dimension dimension);

  // Where a rank is, for reports: "step 3, layer 5 backward". Cheap; set by the training loop.
  void set_position(int world_rank, std::string position);

  // Ends the job: every present and future wait throws. The first call's reason is the one reported.
  void abort(int world_rank, const std::string& reason);
  bool aborted() const;

  // One text of all ranks' last operations: who waits in what, who is missing from which collective, step and layer.
  std::string report() const;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

// Runs body(rank) on `size` threads and waits for all. When one throws, the world is aborted so that the others end within
// moments, and the first failure is rethrown here with "rank R: " before its message (same Error kind); other ranks'
// consequential errors are dropped. A lone rank runs on the calling thread.
void run_thread_ranks(int size, double timeout_seconds, const std::function<void(int rank, ThreadWorld& world)>& body);

}  // namespace farspan
