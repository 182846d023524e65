// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "comm/collective_rules.h"
#include "comm/communicator.h"
#include "comm/mpi/mpi_call.h"

namespace farspan {

class MpiWorld;

// One rank's end of a group of processes.
class MpiCommunicator final : public Communicator {
 public:
  // `world` must outlive it.
  MpiCommunicator(MpiWorld& world, MpiGroup group, Dimension dimension);

  Work all_reduce(Tensor data, std::string_view label) override;
  Work all_gather(const Tensor& part, Tensor whole, std::string_view label) override;
  Work reduce_scatter(const Tensor& whole, Tensor part, std::string_view label) override;
  Work all_to_all(const Tensor& send, Tensor receive, std::string_view label) override;
  Work exchange(std::span<const Message> sends, std::span<const Message> receives, std::string_view label) override;
  void barrier(std::string_view label) override;

 private:
  class StartedCall;
  Work start(Operation operation, const CallBytes& bytes, const Tensor& source, const Tensor& target,
             std::string_view label);
  Work start(CallArguments call, const CallBytes& bytes);

  MpiWorld& world_;
  MpiGroup group_;
};

}  // namespace farspan
