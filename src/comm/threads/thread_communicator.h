// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "comm/call_communicator.h"
#include "comm/threads/mover.h"
#include "comm/threads/rendezvous.h"
#include "comm/threads/thread_job.h"

namespace farspan {

// One rank's end of a Rendezvous. Used by that rank's thread only.
class ThreadCommunicator final : public CallCommunicator {
 public:
  // `group` belongs to `job`. `mover` reads and writes the memory of this rank's tensors, and reads the peers'.
  ThreadCommunicator(std::shared_ptr<ThreadJob> job, Rendezvous& group, Dimension dimension, int rank,
                     std::vector<int> ranks, std::unique_ptr<Mover> mover);

 private:
  class PostedCall;
  Work start(CallArguments call) override;
  void update_traffic() override { traffic_.exposed_seconds += mover_->take_exposed_seconds(); }

  std::shared_ptr<ThreadJob> job_;
  Rendezvous& group_;
  std::unique_ptr<Mover> mover_;
};

}  // namespace farspan
