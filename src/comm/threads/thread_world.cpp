// SPDX-License-Identifier: Apache-2.0
#include "comm/threads/thread_world.h"

#include <algorithm>
#include <set>

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
  const auto place = std::find(ranks.begin(), ranks.end(), world_rank);
  FARSPAN_CHECK(place != ranks.end(), "{} group [{}] does not hold rank {}", name_of(dimension), fmt::join(ranks, ", "),
                world_rank);
  FARSPAN_CHECK(std::set<int>(ranks.begin(), ranks.end()).size() == ranks.size(), "{} group [{}] holds a rank twice",
                name_of(dimension), fmt::join(ranks, ", "));
  for (int rank : ranks)
    FARSPAN_CHECK(rank >= 0 && rank < size(), "{} group [{}]: there is no rank {} in a world of {}", name_of(dimension),
                  fmt::join(ranks, ", "), rank, size());
  const int rank = static_cast<int>(place - ranks.begin());
  Rendezvous& group = job_->group(world_rank, ranks, dimension);
  return std::make_unique<ThreadCommunicator>(job_, group, dimension, rank, std::move(ranks));
}

void ThreadWorld::set_position(int world_rank, std::string position) {
  job_->recorder(world_rank).set_position(std::move(position));
}

void ThreadWorld::abort(int world_rank, const std::string& reason) {
  job_->fail({world_rank, ErrorKind::communication, reason});
}

bool ThreadWorld::aborted() const { return job_->failed(); }

std::string ThreadWorld::report() const { return job_->report(); }

}  // namespace farspan
