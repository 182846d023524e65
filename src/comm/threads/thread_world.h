// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process. Messages are copied straight from the sender's memory into the receiver's: no
// staging buffers, so what the arena planned is all there is.
#pragma once

#include <memory>

#include "comm/world.h"

namespace farspan {

class ThreadJob;

class ThreadWorld final : public World {
 public:
  // `timeout_seconds`: how long any wait may last before it becomes an error that names the missing ranks; above 0.
  ThreadWorld(int size, double timeout_seconds);
  ~ThreadWorld() override;
  ThreadWorld(const ThreadWorld&) = delete;
  ThreadWorld& operator=(const ThreadWorld&) = delete;

  int size() const override;
  int first_local_rank() const override { return 0; }
  std::unique_ptr<Communicator> group(int world_rank, std::vector<int> ranks, Dimension dimension) override;
  void set_position(int world_rank, std::string position) override;
  void abort(int world_rank, const std::string& reason) override;
  bool aborted() const override;
  std::string report() const override;

 private:
  friend void run_thread_ranks(int, double, const RankBody&, double);
  std::shared_ptr<ThreadJob> job_;
};

// Runs body(rank) on `size` threads and waits for all. When one throws, the world is aborted so that the others end
// within moments, and the first failure is rethrown here with "rank R: " before its message (same Error kind); other
// ranks' consequential errors are dropped. An exception that is no farspan::Error becomes an InternalError with its
// text. A rank that returns while another waits for it is a CommunicationError there. A lone rank runs on the calling
// thread.
//
// Before a communication failure is rethrown the log says what every rank did last.
//
// A rank that has not ended `grace_seconds` after the failure is stuck outside any wait and cannot be stopped: the line
// "farspan: error: ..." names the failure and the stuck ranks, and the process ends with the failure's exit status.
void run_thread_ranks(int size, double timeout_seconds, const RankBody& body, double grace_seconds = 10);

}  // namespace farspan
