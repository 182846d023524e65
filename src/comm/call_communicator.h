// SPDX-License-Identifier: Apache-2.0
// What every backend that moves data does alike: each collective is checked against the rules
// (comm/collective_rules.h), becomes one CallArguments, is started by the backend, and is counted once it has been.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "comm/collective_rules.h"
#include "comm/communicator.h"

namespace farspan {

// One call as a rank makes it.
struct CallArguments {
  Operation operation = Operation::barrier;
  DType dtype = DType::u8;
  int64_t bytes = 0;  // CallBytes::payload
  std::string label;
  const std::byte* source = nullptr;
  std::byte* target = nullptr;
  std::vector<Message> sends;  // exchange only
  std::vector<Message> receives;
  // Nothing is moved: the ranks only find out that all make the same call, and what carries the data is elsewhere.
  bool announced = false;
};

class CallCommunicator : public Communicator {
 public:
  Work all_reduce(Tensor data, std::string_view label) final;
  Work all_gather(const Tensor& part, Tensor whole, std::string_view label) final;
  Work reduce_scatter(const Tensor& whole, Tensor part, std::string_view label) final;
  Work all_to_all(const Tensor& send, Tensor receive, std::string_view label) final;
  Work exchange(std::span<const Message> sends, std::span<const Message> receives, std::string_view label) final;
  void barrier(std::string_view label) final;

  // A call whose data another communicator of the same ranks moves. Completes when all who take part have announced it;
  // throws as any call does where they disagree, do not come, or the job has failed. Not counted.
  Work announce(CallArguments call);

 protected:
  using Communicator::Communicator;
  virtual Work start(CallArguments call) = 0;

 private:
  class ObservedCall;
  Work start_counted(Operation operation, const CallBytes& bytes, const Tensor& source, const Tensor& target,
                     std::string_view label);
  Work start_counted(CallArguments call, const CallBytes& bytes);
};

}  // namespace farspan
