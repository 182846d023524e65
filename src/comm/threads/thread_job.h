// SPDX-License-Identifier: Apache-2.0
// ThreadJob: what the ranks of one ThreadWorld share: the groups, every rank's recorder, who has ended, and the failure
// that ends the job.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/failure.h"
#include "comm/recorder.h"

namespace farspan {

class Rendezvous;

class ThreadJob {
 public:
  ThreadJob(int size, double timeout_seconds);
  ~ThreadJob();

  int size() const { return static_cast<int>(recorders_.size()); }
  double timeout_seconds() const { return timeout_seconds_; }
  Recorder& recorder(int rank) const;

  // The group that the `ranks` share: the n-th call of a member with these arguments meets the n-th of the others.
  // Owned by the job.
  Rendezvous& group(int rank, const std::vector<int>& ranks, Dimension dimension);

  // Ends the job: every wait, present and future, throws PeerFailure.
  void fail(RankFailure failure);
  bool failed() const { return failed_.load(); }
  std::optional<RankFailure> failure() const;

  // The rank makes no more calls; who waits for it is told.
  void end(int rank);
  bool ended(int rank) const { return ended_[static_cast<size_t>(rank)].load(); }

  // Returns when all ranks have ended, or `grace_seconds` after a failure: then with the ranks that have not.
  std::vector<int> wait_for_ranks(double grace_seconds) const;

  // The open calls, and the latest `records` operations of each rank.
  std::string report(int64_t records) const;

 private:
  struct GroupKey {
    Dimension dimension;
    std::vector<int> ranks;
    int64_t occurrence;  // 0 for a rank's first group of these ranks and this dimension
    auto operator<=>(const GroupKey&) const = default;
  };

  void wake_all_groups();

  const double timeout_seconds_;
  std::vector<std::unique_ptr<Recorder>> recorders_;
  std::vector<std::atomic<bool>> ended_;
  std::atomic<bool> failed_ = false;

  mutable std::mutex failure_mutex_;  // taken last
  std::optional<RankFailure> failure_;

  mutable std::mutex mutex_;  // taken before a group's, never after
  mutable std::condition_variable changed_;
  std::map<GroupKey, std::unique_ptr<Rendezvous>> groups_;
  std::vector<std::map<GroupKey, int64_t>> made_;  // by rank; the key's occurrence is 0, the value counts
};

}  // namespace farspan
