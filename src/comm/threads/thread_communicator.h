// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "comm/collective_rules.h"
#include "comm/communicator.h"
#include "comm/threads/rendezvous.h"
#include "comm/threads/thread_job.h"

namespace farspan {

// One rank's end of a Rendezvous. Used by that rank's thread only.
class ThreadCommunicator final : public Communicator {
 public:
  // `group` belongs to `job`.
  ThreadCommunicator(std::shared_ptr<ThreadJob> job, Rendezvous& group, Dimension dimension, int rank,
                     std::vector<int> ranks);

  Work all_reduce(Tensor data, std::string_view label) override;
  Work all_gather(const Tensor& part, Tensor whole, std::string_view label) override;
  Work reduce_scatter(const Tensor& whole, Tensor part, std::string_view label) override;
  Work all_to_all(const Tensor& send, Tensor receive, std::string_view label) override;
  Work exchange(std::span<const Message> sends, std::span<const Message> receives, std::string_view label) override;
  void barrier(std::string_view label) override;

 private:
  class PostedCall;
  Work post(Operation operation, const CallBytes& bytes, const Tensor& source, const Tensor& target,
            std::string_view label);
  Work start(Posting posting, const CallBytes& bytes);

  std::shared_ptr<ThreadJob> job_;
  Rendezvous& group_;
};

}  // namespace farspan
