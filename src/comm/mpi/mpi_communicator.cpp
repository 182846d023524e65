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
    : CallCommunicator(dimension, group.rank, group.ranks), world_(world), group_(std::move(group)) {}

Work MpiCommunicator::start(CallArguments call) {
  return Work(std::make_unique<StartedCall>(*this, world_.start(group_, std::move(call))));
}

}  // namespace farspan
