// SPDX-License-Identifier: Apache-2.0
#include "comm/threads/thread_world.h"

#include "comm/cuda/cuda_mover.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/threads/thread_communicator.h"
#include "comm/threads/thread_job.h"

namespace farspan {

namespace {

GpuBackend resolve(GpuBackend backend, int ranks) {
  if (backend != GpuBackend::automatic) return backend;
  const bool own_gpus = ranks > 1 && ranks <= cuda_device_count();
  return own_gpus && nccl_absence().empty() ? GpuBackend::nccl : GpuBackend::copies;
}

}  // namespace

ThreadWorld::ThreadWorld(int size, double timeout_seconds, GpuBackend backend) : backend_(backend) {
  FARSPAN_CHECK(size > 0, "a world of {} ranks; at least 1", size);
  FARSPAN_CHECK(timeout_seconds > 0, "a time-out of {} s; above 0", timeout_seconds);
  job_ = std::make_shared<ThreadJob>(size, timeout_seconds);
}

ThreadWorld::~ThreadWorld() = default;

int ThreadWorld::size() const { return job_->size(); }

std::unique_ptr<Communicator> ThreadWorld::group(int world_rank, std::vector<int> ranks, Dimension dimension) {
  return make_group(world_rank, std::move(ranks), dimension, make_host_mover());
}

std::unique_ptr<Communicator> ThreadWorld::group(int world_rank, std::vector<int> ranks, Dimension dimension,
                                                 Device& device) {
  if (!device.on_cuda()) return group(world_rank, std::move(ranks), dimension);
  if (ranks.size() == 1 || resolve(backend_, size()) == GpuBackend::copies)
    return make_group(world_rank, std::move(ranks), dimension, make_cuda_mover(device));
  return make_nccl_communicator(make_group(world_rank, std::move(ranks), dimension, make_host_mover()), *this, device,
                                job_->timeout_seconds());
}

std::unique_ptr<CallCommunicator> ThreadWorld::make_group(int world_rank, std::vector<int> ranks, Dimension dimension,
                                                          std::unique_ptr<Mover> mover) {
  const int rank = place_in_group(world_rank, ranks, dimension);
  Rendezvous& group = job_->group(world_rank, ranks, dimension);
  return std::make_unique<ThreadCommunicator>(job_, group, dimension, rank, std::move(ranks), std::move(mover));
}

void ThreadWorld::set_position(int world_rank, std::string position) {
  job_->recorder(world_rank).set_position(std::move(position));
}

void ThreadWorld::abort(int world_rank, const std::string& reason) {
  job_->fail({world_rank, ErrorKind::communication, reason, false, {}, false});
}

bool ThreadWorld::aborted() const { return job_->failed(); }

std::string ThreadWorld::report() const {
  // Enough to see which call of a layer each rank has reached.
  constexpr int64_t kReportedOperations = 16;
  return job_->report(kReportedOperations);
}

}  // namespace farspan
