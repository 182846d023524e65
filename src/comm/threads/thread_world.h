// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process. Messages are copied straight from the sender's memory into the receiver's, the CPU's
// or a GPU's: no staging buffers, so what the arena planned is all there is. Ranks that each have a GPU can have NCCL
// carry the tensors on them.
#pragma once

#include <memory>

#include "comm/world.h"

namespace farspan {

class CallCommunicator;
class Mover;
class ThreadJob;

// What carries messages between ranks whose tensors are on GPUs.
// How long the other ranks may take to stop after one has failed.
inline constexpr double kGraceSeconds = 10;

enum class GpuBackend {
  automatic,  // NCCL where every rank has a GPU to itself and NCCL can be loaded, else copies
  copies,     // each rank copies from, or sums over, its peers' memory; ranks may share a GPU
  nccl,
};

class ThreadWorld final : public World {
 public:
  // `timeout_seconds`: how long any wait may last before it becomes an error that names the missing ranks; above 0.
  ThreadWorld(int size, double timeout_seconds, GpuBackend backend = GpuBackend::automatic);
  ~ThreadWorld() override;
  ThreadWorld(const ThreadWorld&) = delete;
  ThreadWorld& operator=(const ThreadWorld&) = delete;

  int size() const override;
  int first_local_rank() const override { return 0; }
  std::unique_ptr<Communicator> group(int world_rank, std::vector<int> ranks, Dimension dimension) override;
  std::unique_ptr<Communicator> group(int world_rank, std::vector<int> ranks, Dimension dimension,
                                      Device& device) override;
  int gpu_of(int world_rank) const override { return gpu_of_place(world_rank); }
  void set_position(int world_rank, std::string position) override;
  void abort(int world_rank, const std::string& reason) override;
  bool aborted() const override;
  std::string report() const override;

 private:
  friend void run_thread_ranks(int, double, const RankBody&, double, GpuBackend);
  std::unique_ptr<CallCommunicator> make_group(int world_rank, std::vector<int> ranks, Dimension dimension,
                                               std::unique_ptr<Mover> mover);

  std::shared_ptr<ThreadJob> job_;
  const GpuBackend backend_;
};

// Runs body(rank) on `size` threads and waits for all. When one throws, the world is aborted so that the others end
// within moments, and the first failure is rethrown here with "rank R: " before its message (same Error kind); other
// ranks' consequential errors are dropped. An exception that is no farspan::Error becomes an InternalError with its
// text. A rank that returns while another waits for it is a CommunicationError there. A lone rank runs on the calling
// thread.
//
// Before a communication failure is rethrown the log says what every rank did last.
//
// A rank that has not ended `grace_seconds` after the failure is stuck outside any wait and cannot be stopped: the line
// "farspan: error: ..." names the failure and the stuck ranks, and the process ends with the failure's exit status.
void run_thread_ranks(int size, double timeout_seconds, const RankBody& body, double grace_seconds = kGraceSeconds,
                      GpuBackend backend = GpuBackend::automatic);

}  // namespace farspan
