// SPDX-License-Identifier: Apache-2.0
#include "comm/threads/thread_job.h"

#include <algorithm>
#include <chrono>

#include "comm/threads/rendezvous.h"

namespace farspan {
namespace {

// Operations of each rank that a report shows: enough to see which call of a layer each rank has reached.
constexpr int64_t kReportedOperations = 16;

}  // namespace

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
  const auto deadline =
      std::chrono::steady_clock::now() +
      std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(grace_seconds));
  changed_.wait_until(lock, deadline, all_ended);
  std::vector<int> missing;
  for (int rank = 0; rank < size(); ++rank)
    if (!ended(rank)) missing.push_back(rank);
  return missing;
}

std::string ThreadJob::report() const {
  std::string text;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, group] : groups_) text += group->report();
  }
  if (const std::optional<RankFailure> first = failure()) text += fmt::format("stopped by rank {}\n", first->rank);
  for (int rank = 0; rank < size(); ++rank) {
    const std::string position = recorder(rank).position();
    text +=
        fmt::format("rank {}{}{}{}\n", rank, position.empty() ? "" : " at ", position, ended(rank) ? ", ended" : "");
    for (const OperationRecord& record : recorder(rank).latest(kReportedOperations))
      text += fmt::format("  {}{}{}\n", record.str(), record.position.empty() ? "" : ", posted at ", record.position);
  }
  return text;
}

}  // namespace farspan
