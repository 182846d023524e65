// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/mpi_communicator.h"

#include <exception>
#include <utility>

#include "comm/exposed_time.h"
#include "comm/mpi/mpi_world.h"

namespace farspan {

// The state of a started call. One that dies unwaited, other than by an exception, fails the whole job: the peers count
// on its memory.
class MpiCommunicator::StartedCall final : public Work::State {
 public:
  StartedCall(MpiCommunicator& communicator, std::unique_ptr<MpiCall> call)
      : communicator_(communicator), call_(std::move(call)) {}

  ~StartedCall() override {
    if (!call_) return;
    if (std::uncaught_exceptions() <= exceptions_)
      communicator_.world_.fail_unwaited(*call_);
    else
      communicator_.world_.give_up(*call_);
  }

  void wait() override {
    if (!call_) return;
    const std::unique_ptr<MpiCall> call = std::move(call_);
    const ExposedTime exposed(communicator_.traffic_);
    communicator_.world_.wait(*call);
  }

 private:
  MpiCommunicator& communicator_;
  std::unique_ptr<MpiCall> call_;
  int exceptions_ = std::uncaught_exceptions();
};

MpiCommunicator::MpiCommunicator(MpiWorld& world, MpiGroup group, Dimension dimension)
    : Communicator(dimension, group.rank, group.ranks), world_(world), group_(std::move(group)) {}

Work MpiCommunicator::all_reduce(Tensor data, std::string_view label) {
  return start(Operation::all_reduce, check_all_reduce(data, rank(), size(), label), data, data, label);
}

Work MpiCommunicator::all_gather(const Tensor& part, Tensor whole, std::string_view label) {
  const CallBytes bytes = check_all_gather(part, whole, size(), label);
  check_overlap(part, whole, rank() * part.bytes(), Operation::all_gather, label);
  return start(Operation::all_gather, bytes, part, whole, label);
}

Work MpiCommunicator::reduce_scatter(const Tensor& whole, Tensor part, std::string_view label) {
  const CallBytes bytes = check_reduce_scatter(whole, part, size(), label);
  check_overlap(whole, part, rank() * part.bytes(), Operation::reduce_scatter, label);
  return start(Operation::reduce_scatter, bytes, whole, part, label);
}

Work MpiCommunicator::all_to_all(const Tensor& send, Tensor receive, std::string_view label) {
  const CallBytes bytes = check_all_to_all(send, receive, size(), label);
  check_overlap(send, receive, size() == 1 ? 0 : kNowhere, Operation::all_to_all, label);
  return start(Operation::all_to_all, bytes, send, receive, label);
}

Work MpiCommunicator::exchange(std::span<const Message> sends, std::span<const Message> receives,
                               std::string_view label) {
  const CallBytes bytes = check_exchange(sends, receives, rank(), size(), label);
  for (const Message& send : sends)
    for (const Message& receive : receives)
      check_overlap(send.data, receive.data, kNowhere, Operation::exchange, label);
  CallArguments call;
  call.operation = Operation::exchange;
  call.bytes = bytes.payload;
  call.label = label;
  call.sends.assign(sends.begin(), sends.end());
  call.receives.assign(receives.begin(), receives.end());
  return start(std::move(call), bytes);
}

void MpiCommunicator::barrier(std::string_view label) { start(Operation::barrier, {}, {}, {}, label).wait(); }

Work MpiCommunicator::start(Operation operation, const CallBytes& bytes, const Tensor& source, const Tensor& target,
                            std::string_view label) {
  CallArguments call;
  call.operation = operation;
  call.dtype = source.dtype();
  call.bytes = bytes.payload;
  call.label = label;
  call.source = static_cast<const std::byte*>(source.raw());
  call.target = static_cast<std::byte*>(target.raw());
  return start(std::move(call), bytes);
}

Work MpiCommunicator::start(CallArguments call, const CallBytes& bytes) {
  auto state = std::make_unique<StartedCall>(*this, world_.start(group_, std::move(call)));
  count(bytes, traffic_);
  return Work(std::move(state));
}

}  // namespace farspan
