// SPDX-License-Identifier: Apache-2.0
#include "comm/cuda/lone_cuda_communicator.h"

#include "comm/call_communicator.h"
#include "comm/cuda/cuda_mover.h"
#include "comm/threads/posting.h"

namespace farspan {
namespace {

class LoneCudaCommunicator final : public CallCommunicator {
 public:
  LoneCudaCommunicator(Dimension dimension, int world_rank, Device& device)
      : CallCommunicator(dimension, 0, {world_rank}), mover_(make_cuda_mover(device)) {}

 private:
  // The one rank has all it needs, so every step can be taken at once.
  Work start(CallArguments call) override {
    Posting posting;
    static_cast<CallArguments&>(posting) = std::move(call);
    posting.stage = Stage::posted;
    const std::span<Posting> postings(&posting, 1);
    if (const auto found = mismatch(postings, 0, 0, ranks())) throw CommunicationError(*found);
    mover_->offer(posting);
    while (posting.stage != Stage::complete) posting.stage = take_step(postings, 0, *mover_);
    resume(postings, 0, *mover_);
    return Work();
  }

  std::unique_ptr<Mover> mover_;
};

}  // namespace

std::unique_ptr<Communicator> make_lone_cuda_communicator(Dimension dimension, int world_rank, Device& device) {
  return std::make_unique<LoneCudaCommunicator>(dimension, world_rank, device);
}

}  // namespace farspan
