// SPDX-License-Identifier: Apache-2.0
#include "comm/threads/thread_world.h"

#include "comm/threads/thread_communicator.h"
#include "comm/threads/thread_job.h"

namespace farspan {

ThreadWorld::ThreadWorld(int size, double timeout_seconds) {
  FARSPAN_CHECK(size > 0, "a world of {} ranks; at least 1", size);
  FARSPAN_CHECK(timeout_seconds > 0, "a time-out of {} s; above 0", timeout_seconds);
  job_ = std::make_shared<ThreadJob>(size, timeout_seconds);
}

ThreadWorld::~ThreadWorld() = default;

int ThreadWorld::size() const { return job_->size(); }

std::unique_ptr<Communicator> ThreadWorld::group(int world_rank, std::vector<int> ranks, Dimension dimension) {
  const int rank = place_in_group(world_rank, ranks, dimension);
  Rendezvous& group = job_->group(world_rank, ranks, dimension);
  return std::make_unique<ThreadCommunicator>(job_, group, dimension, rank, std::move(ranks));
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
