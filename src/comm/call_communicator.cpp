// SPDX-License-Identifier: Apache-2.0
#include "comm/call_communicator.h"

#include <chrono>
#include <memory>
#include <utility>

namespace farspan {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

// A call that tells the observer, if there still is one, when it has been waited for.
class CallCommunicator::ObservedCall final : public Work::State {
 public:
  ObservedCall(CallCommunicator& communicator, std::string label, int64_t bytes, Work work)
      : communicator_(communicator), label_(std::move(label)), bytes_(bytes), work_(std::move(work)) {}

  void wait() override {
    const double waited_from = now();
    work_.wait();
    if (communicator_.observer()) communicator_.observer()->on_call(label_, bytes_, started_, waited_from, now());
  }

 private:
  CallCommunicator& communicator_;
  std::string label_;
  int64_t bytes_;
  double started_ = now();
  Work work_;
};

Work CallCommunicator::all_reduce(Tensor data, std::string_view label) {
  return start_counted(Operation::all_reduce, check_all_reduce(data, rank(), size(), label), data, data, label);
}

Work CallCommunicator::all_gather(const Tensor& part, Tensor whole, std::string_view label) {
  const CallBytes bytes = check_all_gather(part, whole, size(), label);
  check_overlap(part, whole, rank() * part.bytes(), Operation::all_gather, label);
  return start_counted(Operation::all_gather, bytes, part, whole, label);
}

Work CallCommunicator::reduce_scatter(const Tensor& whole, Tensor part, std::string_view label) {
  const CallBytes bytes = check_reduce_scatter(whole, part, size(), label);
  check_overlap(whole, part, rank() * part.bytes(), Operation::reduce_scatter, label);
  return start_counted(Operation::reduce_scatter, bytes, whole, part, label);
}

Work CallCommunicator::all_to_all(const Tensor& send, Tensor receive, std::string_view label) {
  const CallBytes bytes = check_all_to_all(send, receive, size(), label);
  check_overlap(send, receive, size() == 1 ? 0 : kNowhere, Operation::all_to_all, label);
  return start_counted(Operation::all_to_all, bytes, send, receive, label);
}

Work CallCommunicator::exchange(std::span<const Message> sends, std::span<const Message> receives,
                                std::string_view label) {
  const CallBytes bytes = check_exchange(sends, receives, rank(), size(), label);
  check_apart(sends, receives, label);
  CallArguments call;
  call.operation = Operation::exchange;
  call.bytes = bytes.payload;
  call.label = label;
  call.sends.assign(sends.begin(), sends.end());
  call.receives.assign(receives.begin(), receives.end());
  return start_counted(std::move(call), bytes);
}

void CallCommunicator::barrier(std::string_view label) { start_counted(Operation::barrier, {}, {}, {}, label).wait(); }

Work CallCommunicator::announce(CallArguments call) {
  call.announced = true;
  return start(std::move(call));
}

Work CallCommunicator::start_counted(Operation operation, const CallBytes& bytes, const Tensor& source,
                                     const Tensor& target, std::string_view label) {
  CallArguments call;
  call.operation = operation;
  call.dtype = source.dtype();
  call.bytes = bytes.payload;
  call.label = label;
  call.source = static_cast<const std::byte*>(source.raw());
  call.target = static_cast<std::byte*>(target.raw());
  return start_counted(std::move(call), bytes);
}

Work CallCommunicator::start_counted(CallArguments call, const CallBytes& bytes) {
  std::string label = observer() ? call.label : "";
  Work work = start(std::move(call));
  count(bytes, traffic_);
  if (!observer()) return work;
  return Work(std::make_unique<ObservedCall>(*this, std::move(label), bytes.received, std::move(work)));
}

}  // namespace farspan
