// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process. Messages are copied straight from the sender's memory into the receiver's: no
// staging buffers, so what the arena planned is all there is.
#pragma once

#include <functional>
#include <memory>

#include "comm/communicator.h"

namespace farspan {

class ThreadJob;

class ThreadWorld {
 public:
  // `timeout_seconds`: how long any wait may last before it becomes an error that names the missing ranks; above 0.
  ThreadWorld(int size, double timeout_seconds);
  ~ThreadWorld();
  ThreadWorld(const ThreadWorld&) = delete;
  ThreadWorld& operator=(const ThreadWorld&) = delete;

  int size() const;

  // The calling rank's end of the group `ranks` (world ranks, group order; must hold `world_rank`). Every member must
  // make the same groups in the same order. Groups of one rank are allowed: their collectives are local. The
  // communicator must outlive its Works; calls of one group may be waited for in any order. Throws InternalError on bad
  // ranks.
  std::unique_ptr<Communicator> group(int world_rank, std::vector<int> ranks, Dimension dimension);

  // Where a rank is, for reports: "step 3, layer 5 backward". Cheap; set by the training loop.
  void set_position(int world_rank, std::string position);

  // Ends the job: every present and future wait throws. The first call's reason is the one reported.
  void abort(int world_rank, const std::string& reason);
  bool aborted() const;

  // One text of all ranks' last operations: who waits in what, who is missing from which collective, step and layer.
  std::string report() const;

 private:
  friend void run_thread_ranks(int, double, const std::function<void(int, ThreadWorld&)>&, double);
  std::shared_ptr<ThreadJob> job_;
};

// Runs body(rank) on `size` threads and waits for all. When one throws, the world is aborted so that the others end
// within moments, and the first failure is rethrown here with "rank R: " before its message (same Error kind); other
// ranks' consequential errors are dropped. An exception that is no farspan::Error becomes an InternalError with its
// text. A rank that returns while another waits for it is a CommunicationError there. A lone rank runs on the calling
// thread.
//
// A rank that has not ended `grace_seconds` after the failure is stuck outside any wait and cannot be stopped: the line
// "farspan: error: ..." names the failure and the stuck ranks, and the process ends with the failure's exit status.
void run_thread_ranks(int size, double timeout_seconds, const std::function<void(int rank, ThreadWorld& world)>& body,
                      double grace_seconds = 10);

}  // namespace farspan
