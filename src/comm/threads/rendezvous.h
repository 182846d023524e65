// SPDX-License-Identifier: Apache-2.0
// Rendezvous: where the threads of one group meet. Calls are numbered; the ranks' n-th calls belong together. A call
// posts the addresses of its memory and returns; the waiting thread does its rank's share by reading the peers' memory:
//
//   posted --(all sources posted)--> [reduced --(all reduced)-->] received --(all readers received)--> complete
//
// The first arrow copies or sums; the last one means that nobody reads this rank's memory any more. A waiting rank
// takes the ready steps of all its open calls in this group, so calls may be waited for in any order. Calls of
// different groups do not advance each other.
//
// A rank that gives up (its wait throws, or its Work dies while an exception unwinds) withdraws its memory first: it
// waits for those who are reading at that moment, a memcpy's time, and the rest find it withdrawn.
//
// On GPUs a step is queued rather than done (comm/threads/mover.h), and a stage means that it is. So the threads meet
// as above, far ahead of the GPUs; and since a queue only ever waits for what another has been given before, whichever
// order the ranks' steps are queued in, no queues can wait for each other in a circle.
//
// One mutex a group, one condition variable a rank; a rank that sleeps is woken only when it can take a step.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/threads/mover.h"
#include "comm/threads/posting.h"

namespace farspan {

class ThreadJob;

class Rendezvous {
 public:
  // `ranks`: world ranks. The ranks below are within the group.
  Rendezvous(ThreadJob& job, Dimension dimension, std::vector<int> ranks);

  // Publishes the rank's next call and returns its sequence number. Throws CommunicationError when it does not fit what
  // the others called, which also ends every other wait in this group, and PeerFailure when the job has failed.
  int64_t post(int rank, Posting posting);

  // Takes the steps of the rank's open calls that are ready. Throws what the mover throws.
  void advance(int rank, Mover& mover);

  // Completes the rank's call. Throws CommunicationError on a mismatch, at the deadline, and when a rank that is needed
  // has ended; PeerFailure when the job has failed or a peer withdrew; and what the mover throws. The call is closed in
  // every case.
  void wait(int rank, int64_t sequence, Mover& mover);

  // Closes a call that will not be waited for.
  void withdraw(int rank, int64_t sequence, Mover& mover);

  void wake_all();

  // "all_gather 'layer 3 key/value' of 1024 bytes, call 7 of cp group [0, 2]": an open call of the rank.
  std::string describe(int rank, int64_t sequence) const;
  int world_rank(int rank) const { return ranks_[static_cast<size_t>(rank)]; }

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;

  struct Call {
    int64_t sequence = 0;
    std::vector<Posting> postings;  // by rank
    int reading = 0;                // ranks that are copying at this moment, without the lock
    int closed = 0;
  };
  struct Member {
    std::condition_variable woken;
    bool waiting = false;
    int64_t posted = 0;  // calls so far
  };

  int size() const { return static_cast<int>(ranks_.size()); }
  Posting& posting(Call& call, int rank) const { return call.postings[static_cast<size_t>(rank)]; }
  const Posting& posting(const Call& call, int rank) const { return call.postings[static_cast<size_t>(rank)]; }

  bool ready(const Call& call, int rank) const;
  std::vector<int> lagging(const Call& call, int rank) const;

  bool advance(Call& call, int rank, Mover& mover, Lock& lock);
  bool advance_all(int rank, Mover& mover, Lock& lock);
  void wake_ready(Call& call);
  void wake_everyone();
  void give_up(Call& call, int rank, Mover& mover, Lock& lock);
  void close(Call& call);
  void settle(const Call& call, Mover& mover, Lock& lock) const;

  void throw_if_stopped() const;
  void throw_if_peer_gone(const Call& call, int rank) const;
  [[noreturn]] void throw_timeout(const Call& call, int rank) const;
  std::string title(const Call& call, const Posting& posting) const;

  ThreadJob& job_;
  const std::vector<int> ranks_;
  const std::string name_;  // "cp group [0, 2]"

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Member>> members_;
  std::map<int64_t, Call> calls_;  // open ones, by sequence number
  std::optional<std::string> disagreement_;
};

}  // namespace farspan
