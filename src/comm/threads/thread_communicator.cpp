// SPDX-License-Identifier: Apache-2.0
#include "comm/threads/thread_communicator.h"

#include <exception>
#include <utility>

#include "comm/collective_rules.h"
#include "comm/exposed_time.h"

namespace farspan {
// The state of a started call. One that dies unwaited, other than by an exception, fails the whole job: its memory may
// be gone while the peers still count on it.
class ThreadCommunicator::PostedCall final : public Work::State {
 public:
  explicit PostedCall(ThreadCommunicator& communicator) : communicator_(communicator), job_(communicator.job_) {}

  ~PostedCall() override {
    if (!open_) return;
    Rendezvous& group = communicator_.group_;
    const int rank = communicator_.rank();
    if (std::uncaught_exceptions() <= exceptions_)
      job_->fail({.rank = group.world_rank(rank),
                  .kind = ErrorKind::internal,
                  .message = group.describe(rank, sequence_) + ": its Work was destroyed without a wait",
                  .consequence = false,
                  .missing = {},
                  .outside = false});
    group.withdraw(rank, sequence_);
  }

  void post(Posting posting) {
    sequence_ = communicator_.group_.post(communicator_.rank(), std::move(posting));
    open_ = true;
  }

  void wait() override {
    if (!std::exchange(open_, false)) return;
    const ExposedTime exposed(communicator_.traffic_);
    communicator_.group_.wait(communicator_.rank(), sequence_);
  }

 private:
  ThreadCommunicator& communicator_;
  std::shared_ptr<ThreadJob> job_;
  int64_t sequence_ = 0;
  int exceptions_ = std::uncaught_exceptions();
  bool open_ = false;
};

ThreadCommunicator::ThreadCommunicator(std::shared_ptr<ThreadJob> job, Rendezvous& group, Dimension dimension, int rank,
                                       std::vector<int> ranks)
    : Communicator(dimension, rank, std::move(ranks)), job_(std::move(job)), group_(group) {}

Work ThreadCommunicator::all_reduce(Tensor data, std::string_view label) {
  return post(Operation::all_reduce, check_all_reduce(data, rank(), size(), label), data, data, label);
}

Work ThreadCommunicator::all_gather(const Tensor& part, Tensor whole, std::string_view label) {
  const CallBytes bytes = check_all_gather(part, whole, size(), label);
  check_overlap(part, whole, rank() * part.bytes(), Operation::all_gather, label);
  return post(Operation::all_gather, bytes, part, whole, label);
}

Work ThreadCommunicator::reduce_scatter(const Tensor& whole, Tensor part, std::string_view label) {
  const CallBytes bytes = check_reduce_scatter(whole, part, size(), label);
  check_overlap(whole, part, rank() * part.bytes(), Operation::reduce_scatter, label);
  return post(Operation::reduce_scatter, bytes, whole, part, label);
}

Work ThreadCommunicator::all_to_all(const Tensor& send, Tensor receive, std::string_view label) {
  const CallBytes bytes = check_all_to_all(send, receive, size(), label);
  check_overlap(send, receive, size() == 1 ? 0 : kNowhere, Operation::all_to_all, label);
  return post(Operation::all_to_all, bytes, send, receive, label);
}

Work ThreadCommunicator::exchange(std::span<const Message> sends, std::span<const Message> receives,
                                  std::string_view label) {
  const CallBytes bytes = check_exchange(sends, receives, rank(), size(), label);
  for (const Message& send : sends)
    for (const Message& receive : receives)
      check_overlap(send.data, receive.data, kNowhere, Operation::exchange, label);
  Posting posting;
  posting.operation = Operation::exchange;
  posting.bytes = bytes.payload;
  posting.label = label;
  posting.sends.assign(sends.begin(), sends.end());
  posting.receives.assign(receives.begin(), receives.end());
  return start(std::move(posting), bytes);
}

void ThreadCommunicator::barrier(std::string_view label) { post(Operation::barrier, {}, {}, {}, label).wait(); }

Work ThreadCommunicator::post(Operation operation, const CallBytes& bytes, const Tensor& source, const Tensor& target,
                              std::string_view label) {
  Posting posting;
  posting.operation = operation;
  posting.dtype = source.dtype();
  posting.bytes = bytes.payload;
  posting.label = label;
  posting.source = static_cast<const std::byte*>(source.raw());
  posting.target = static_cast<std::byte*>(target.raw());
  return start(std::move(posting), bytes);
}

Work ThreadCommunicator::start(Posting posting, const CallBytes& bytes) {
  auto call = std::make_unique<PostedCall>(*this);  // before anything is published
  call->post(std::move(posting));
  count(bytes, traffic_);
  return Work(std::move(call));
}

}  // namespace farspan
