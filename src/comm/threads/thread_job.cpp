// SPDX-License-Identifier: Apache-2.0
#include "comm/threads/thread_job.h"

#include <algorithm>

#include "comm/deadline.h"
#include "comm/merged_report.h"
#include "comm/threads/rendezvous.h"

namespace farspan {
ThreadJob::ThreadJob(int size, double timeout_seconds)
    : timeout_seconds_(timeout_seconds), ended_(static_cast<size_t>(size)), made_(static_cast<size_t>(size)) {
  for (int rank = 0; rank < size; ++rank) recorders_.push_back(std::make_unique<Recorder>());
}

ThreadJob::~ThreadJob() = default;

Recorder& ThreadJob::recorder(int rank) const {
  FARSPAN_CHECK(rank >= 0 && rank < size(), "there is no rank {} in a world of {}", rank, size());
  return *recorders_[static_cast<size_t>(rank)];
}

Rendezvous& ThreadJob::group(int rank, const std::vector<int>& ranks, Dimension dimension) {
  std::lock_guard lock(mutex_);
  GroupKey key{dimension, ranks, 0};
  key.occurrence = made_[static_cast<size_t>(rank)][key]++;
  std::unique_ptr<Rendezvous>& group = groups_[key];
  if (!group) group = std::make_unique<Rendezvous>(*this, dimension, ranks);
  return *group;
}

void ThreadJob::fail(RankFailure failure) {
  {
    std::lock_guard lock(failure_mutex_);
    if (!failure_ || (failure_->consequence && !failure.consequence)) failure_ = std::move(failure);
    failed_ = true;
  }
  wake_all_groups();
}

std::optional<RankFailure> ThreadJob::failure() const {
  std::lock_guard lock(failure_mutex_);
  return failure_;
}

void ThreadJob::end(int rank) {
  ended_[static_cast<size_t>(rank)] = true;
  wake_all_groups();
}

void ThreadJob::wake_all_groups() {
  std::lock_guard lock(mutex_);
  for (const auto& [key, group] : groups_) group->wake_all();
  changed_.notify_all();
}

std::vector<int> ThreadJob::wait_for_ranks(double grace_seconds) const {
  const auto all_ended = [this] {
    return std::all_of(ended_.begin(), ended_.end(), [](const auto& e) { return e.load(); });
  };
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return all_ended() || failed(); });
  changed_.wait_until(lock, deadline_after(grace_seconds), all_ended);
  std::vector<int> missing;
  for (int rank = 0; rank < size(); ++rank)
    if (!ended(rank)) missing.push_back(rank);
  return missing;
}

std::string ThreadJob::report(int64_t records) const {
  std::vector<RankDump> dumps;
  for (int rank = 0; rank < size(); ++rank) dumps.push_back(dump_of(rank, recorder(rank), ended(rank)));
  const std::optional<RankFailure> first = failure();
  return (first ? fmt::format("stopped by rank {}\n", first->rank) : "") + merged_report(dumps, records);
}

}  // namespace farspan
