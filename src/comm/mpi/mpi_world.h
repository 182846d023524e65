// SPDX-License-Identifier: Apache-2.0
// One rank in each of several processes. Data is sent from and received into the tensors' own memory; only what is to
// be summed passes through kStagingBytes of staging memory (comm/mpi/reduction.h).
//
// All calls of the rank are advanced by whichever call it waits for, and by nothing else: there is no progress thread,
// so what a rank sent in large pieces moves while it is in a wait or starts a call.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/mpi/mpi_call.h"
#include "comm/mpi/processes.h"
#include "comm/world.h"

namespace farspan {

class MpiWorld final : public World {
 public:
  // `timeout_seconds` as for ThreadWorld. `processes` must outlive the world.
  MpiWorld(Processes& processes, double timeout_seconds);

  int size() const override { return processes_.size(); }
  int first_local_rank() const override { return processes_.rank(); }
  std::unique_ptr<Communicator> group(int world_rank, std::vector<int> ranks, Dimension dimension) override;
  // Tensors on GPUs are carried by NCCL, and MPI tells whether the ranks agree.
  std::unique_ptr<Communicator> group(int world_rank, std::vector<int> ranks, Dimension dimension,
                                      Device& device) override;
  int gpu_of(int world_rank) const override;
  void set_position(int world_rank, std::string position) override;
  void abort(int world_rank, const std::string& reason) override;
  bool aborted() const override { return processes_.failed(); }
  std::string report() const override { return processes_.report(); }

  // For the communicators of this world.
  //
  // Starts a call. Throws CommunicationError where it does not fit what a peer has told already, PeerFailure when the
  // job has failed.
  std::unique_ptr<MpiCall> start(MpiGroup& group, CallArguments call);
  // Completes it. Throws CommunicationError on a disagreement in any open call, WaitFailure at the deadline and when a
  // rank that is needed has ended, PeerFailure when the job has failed.
  void wait(MpiCall& call);
  // The call will not be waited for: its memory goes. Nothing can be sent or received after that.
  void give_up(MpiCall& call);
  // The same because of a mistake of the calling code, which fails the job.
  void fail_unwaited(MpiCall& call);

 private:
  using Clock = std::chrono::steady_clock;
  std::unique_ptr<CallCommunicator> host_group(int world_rank, std::vector<int> ranks, Dimension dimension);
  void close(MpiCall& call);
  bool progress();
  void throw_if_stopped() const;
  void throw_if_peer_ended(const MpiCall& call) const;
  [[noreturn]] void throw_timeout(const MpiCall& call) const;

  Processes& processes_;
  MpiLibrary& library_;
  const double timeout_seconds_;
  std::vector<MpiCall*> open_;  // in the order of their start
  Staging staging_;
  std::string disagreement_;
};

// Runs body(rank) for this process's rank, on the calling thread, and returns when every process's rank has ended. When
// one fails the others end within moments, and this throws in every process the job's first failure (same Error kind):
// "rank R: " before its message, and where the ranks were that it waited for. Processes::leave must follow a throw.
void run_process_rank(Processes& processes, double timeout_seconds, const RankBody& body);

}  // namespace farspan
