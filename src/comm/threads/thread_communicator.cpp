// SPDX-License-Identifier: Apache-2.0
#include "comm/threads/thread_communicator.h"

#include <exception>
#include <utility>

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
    group.withdraw(rank, sequence_, *communicator_.mover_);
  }

  void post(Posting posting) {
    Rendezvous& group = communicator_.group_;
    Mover& mover = *communicator_.mover_;
    if (!posting.announced) mover.offer(posting);
    sequence_ = group.post(communicator_.rank(), std::move(posting));
    open_ = true;
    // What is ready to be moved is queued while there is something to compute beside it.
    if (mover.queues()) group.advance(communicator_.rank(), mover);
  }

  void wait() override {
    if (!std::exchange(open_, false)) return;
    if (communicator_.mover_->queues()) return finish();
    const ExposedTime exposed(communicator_.traffic_);
    finish();
  }

 private:
  void finish() { communicator_.group_.wait(communicator_.rank(), sequence_, *communicator_.mover_); }

  ThreadCommunicator& communicator_;
  std::shared_ptr<ThreadJob> job_;
  int64_t sequence_ = 0;
  int exceptions_ = std::uncaught_exceptions();
  bool open_ = false;
};

ThreadCommunicator::ThreadCommunicator(std::shared_ptr<ThreadJob> job, Rendezvous& group, Dimension dimension, int rank,
                                       std::vector<int> ranks, std::unique_ptr<Mover> mover)
    : CallCommunicator(dimension, rank, std::move(ranks)),
      job_(std::move(job)),
      group_(group),
      mover_(std::move(mover)) {}

Work ThreadCommunicator::start(CallArguments call) {
  auto posted = std::make_unique<PostedCall>(*this);  // before anything is published
  Posting posting;
  static_cast<CallArguments&>(posting) = std::move(call);
  posted->post(std::move(posting));
  return Work(std::move(posted));
}

}  // namespace farspan
