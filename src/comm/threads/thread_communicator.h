// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "comm/call_communicator.h"
#include "comm/threads/rendezvous.h"
#include "comm/threads/thread_job.h"

namespace farspan {

// One rank's end of a Rendezvous. Used by that rank's thread only.
class ThreadCommunicator final : public CallCommunicator {
 public:
  // `group` belongs to `job`.
  ThreadCommunicator(std::shared_ptr<ThreadJob> job, Rendezvous& group, Dimension dimension, int rank,
                     std::vector<int> ranks);

 private:
  class PostedCall;
  Work start(CallArguments call) override;

  std::shared_ptr<ThreadJob> job_;
  Rendezvous& group_;
};

}  // namespace farspan
