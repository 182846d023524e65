// SPDX-License-Identifier: Apache-2.0
#include "comm/threads/rendezvous.h"

#include <algorithm>
#include <exception>
#include <thread>

#include "comm/call_text.h"
#include "comm/deadline.h"
#include "comm/threads/thread_job.h"

namespace farspan {
namespace {

// Ranks that an error message describes one by one; the numbers of the others are enough.
constexpr size_t kDescribedRanks = 4;

// Times a waiting rank lets others run before it sleeps. Where ranks outnumber cores the peers only need a core to get
// on, and a yield costs a fifth of a sleep and a wake: 4 ranks on 2 busy cores exchange small messages in 60 us instead
// of 180.
constexpr int kYieldsBeforeSleep = 20;

}  // namespace

Rendezvous::Rendezvous(ThreadJob& job, Dimension dimension, std::vector<int> ranks)
    : job_(job), ranks_(std::move(ranks)), name_(group_name(dimension, ranks_)) {
  for (int rank = 0; rank < size(); ++rank) members_.push_back(std::make_unique<Member>());
}

int64_t Rendezvous::post(int rank, Posting own) {
  const Lock lock(mutex_);
  throw_if_stopped();
  const int64_t sequence = members_[static_cast<size_t>(rank)]->posted++;
  Call& call = calls_[sequence];
  call.sequence = sequence;
  call.postings.resize(static_cast<size_t>(size()));
  own.stage = Stage::posted;
  own.ticket = job_.recorder(world_rank(rank)).record(name_, sequence, own.operation, own.label, own.bytes);
  posting(call, rank) = std::move(own);

  for (int peer = 0; peer < size(); ++peer) {
    if (posting(call, peer).stage == Stage::absent) continue;
    const std::optional<std::string> found = mismatch(call.postings, peer, rank, ranks_);
    if (!found) continue;
    // Not readable: this rank's wait will never come.
    posting(call, rank).withdrawn = true;
    job_.recorder(world_rank(rank)).set_progress(posting(call, rank).ticket, CallProgress::failed);
    disagreement_ = disagreement_text(sequence, name_, *found);
    wake_everyone();
    throw_if_stopped();
  }
  wake_ready(call);
  return sequence;
}

void Rendezvous::advance(int rank, Mover& mover) {
  Lock lock(mutex_);
  advance_all(rank, mover, lock);
}

void Rendezvous::wait(int rank, int64_t sequence, Mover& mover) {
  Lock lock(mutex_);
  Call& call = calls_.at(sequence);
  Posting& own = posting(call, rank);
  Member& member = *members_[static_cast<size_t>(rank)];
  Recorder& recorder = job_.recorder(world_rank(rank));
  const Clock::time_point deadline = deadline_after(job_.timeout_seconds());
  recorder.set_progress(own.ticket, CallProgress::waiting);
  int yields = 0;
  try {
    while (true) {
      throw_if_stopped();
      const bool advanced = advance_all(rank, mover, lock);
      if (own.stage == Stage::complete) break;
      if (advanced) continue;  // the lock was open meanwhile: more may be ready
      throw_if_peer_gone(call, rank);
      if (Clock::now() >= deadline) throw_timeout(call, rank);
      if (yields++ < kYieldsBeforeSleep) {
        lock.unlock();
        std::this_thread::yield();
        lock.lock();
        continue;
      }
      member.waiting = true;
      member.woken.wait_until(lock, deadline);
      member.waiting = false;
    }
    // The lock is not needed: nobody changes what a complete call's steps have left.
    lock.unlock();
    resume(call.postings, rank, mover);
    lock.lock();
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    recorder.set_progress(own.ticket, CallProgress::failed);
    give_up(call, rank, mover, lock);
    throw;
  }
  recorder.set_progress(own.ticket, CallProgress::done);
  close(call);
}

void Rendezvous::withdraw(int rank, int64_t sequence, Mover& mover) {
  Lock lock(mutex_);
  Call& call = calls_.at(sequence);
  job_.recorder(world_rank(rank)).set_progress(posting(call, rank).ticket, CallProgress::failed);
  give_up(call, rank, mover, lock);
}

// The call's memory is the caller's again when this returns. A call that is complete may still be queued: no computing
// comes after it yet.
void Rendezvous::give_up(Call& call, int rank, Mover& mover, Lock& lock) {
  if (posting(call, rank).stage != Stage::complete) {
    posting(call, rank).withdrawn = true;
    wake_everyone();
    Member& member = *members_[static_cast<size_t>(rank)];
    member.waiting = true;
    member.woken.wait(lock, [&] { return call.reading == 0; });
    member.waiting = false;
  }
  settle(call, mover, lock);
  close(call);
}

void Rendezvous::close(Call& call) {
  if (++call.closed == size()) calls_.erase(call.sequence);
}

// Waits for what has been queued of a call that one rank gives up.
void Rendezvous::settle(const Call& call, Mover& mover, Lock& lock) const {
  if (!mover.queues()) return;
  std::vector<const Posting*> moved;
  for (const Posting& each : call.postings)
    if (each.stage >= Stage::reduced) moved.push_back(&each);
  lock.unlock();
  mover.settle(moved);
  lock.lock();
}

bool Rendezvous::ready(const Call& call, int rank) const {
  bool all = true;
  for_each_need(call.postings, rank, posting(call, rank).stage,
                [&](int peer, Stage stage) { all = all && posting(call, peer).stage >= stage; });
  return all;
}

std::vector<int> Rendezvous::lagging(const Call& call, int rank) const {
  std::vector<int> peers;
  for_each_need(call.postings, rank, posting(call, rank).stage, [&](int peer, Stage stage) {
    if (posting(call, peer).stage < stage && std::find(peers.begin(), peers.end(), peer) == peers.end())
      peers.push_back(peer);
  });
  return peers;
}

// Takes the rank's steps in this call as long as they are ready. Unlocks while copying; true when it did.
bool Rendezvous::advance(Call& call, int rank, Mover& mover, Lock& lock) {
  Posting& own = posting(call, rank);
  bool advanced = false;
  while (own.stage != Stage::complete && !own.withdrawn && !disagreement_ && !job_.failed() && ready(call, rank)) {
    bool readable = true;
    if (own.stage != Stage::received)
      for_each_need(call.postings, rank, own.stage,
                    [&](int peer, Stage) { readable = readable && !posting(call, peer).withdrawn; });
    if (!readable) break;
    ++call.reading;
    lock.unlock();
    Stage reached = own.stage;
    std::exception_ptr failure;
    try {
      reached = take_step(call.postings, rank, mover);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    own.stage = reached;
    --call.reading;
    advanced = true;
    wake_ready(call);
    if (failure) std::rethrow_exception(failure);
  }
  return advanced;
}

bool Rendezvous::advance_all(int rank, Mover& mover, Lock& lock) {
  bool advanced = false;
  // The map may change while the lock is open, but not the calls this rank has not closed.
  for (auto it = calls_.begin(); it != calls_.end();) {
    const int64_t sequence = it->first;
    Call& call = it->second;
    if (posting(call, rank).stage != Stage::absent && advance(call, rank, mover, lock)) advanced = true;
    it = calls_.upper_bound(sequence);
  }
  return advanced;
}

void Rendezvous::wake_ready(Call& call) {
  for (int peer = 0; peer < size(); ++peer) {
    const Posting& theirs = posting(call, peer);
    Member& member = *members_[static_cast<size_t>(peer)];
    if (!member.waiting || theirs.stage == Stage::absent) continue;
    if (theirs.withdrawn || ready(call, peer)) member.woken.notify_one();
  }
}

void Rendezvous::wake_everyone() {
  for (const auto& member : members_) member->woken.notify_one();
}

void Rendezvous::wake_all() {
  const Lock lock(mutex_);
  wake_everyone();
}

void Rendezvous::throw_if_stopped() const {
  if (disagreement_) throw CommunicationError(*disagreement_);
  if (!job_.failed()) return;
  const RankFailure failure = *job_.failure();
  throw PeerFailure(fmt::format("{}: stopped because rank {} failed: {}", name_, failure.rank, failure.message));
}

void Rendezvous::throw_if_peer_gone(const Call& call, int rank) const {
  const Posting& own = posting(call, rank);
  for_each_need(call.postings, rank, own.stage, [&](int peer, Stage stage) {
    const Posting& theirs = posting(call, peer);
    if (theirs.withdrawn && (own.stage != Stage::received || theirs.stage < stage))
      throw PeerFailure(fmt::format("{}: rank {} gave it up", title(call, own), world_rank(peer)));
    if (theirs.stage < stage && job_.ended(world_rank(peer))) {
      throw_if_stopped();  // a rank that failed ends too, after its failure is known
      throw CommunicationError(fmt::format("{}: rank {} waits for rank {}, which has ended its work ({})",
                                           title(call, own), world_rank(rank), world_rank(peer),
                                           job_.recorder(world_rank(peer)).whereabouts()));
    }
  });
}

void Rendezvous::throw_timeout(const Call& call, int rank) const {
  const Posting& own = posting(call, rank);
  const std::vector<int> peers = lagging(call, rank);
  std::string missing;
  for (size_t i = 0; i < peers.size(); ++i) {
    const int peer = world_rank(peers[i]);
    if (i > 0) missing += "; ";
    missing +=
        fmt::format("rank {} has not {}", peer, posting(call, peers[i]).stage == Stage::absent ? "come" : "finished");
    if (i < kDescribedRanks) missing += fmt::format(" ({})", job_.recorder(peer).whereabouts());
  }
  throw CommunicationError(
      fmt::format("{}: rank {} waited {} s: {}", title(call, own), world_rank(rank), job_.timeout_seconds(), missing));
}

std::string Rendezvous::describe(int rank, int64_t sequence) const {
  const Lock lock(mutex_);
  const Call& call = calls_.at(sequence);
  return title(call, posting(call, rank));
}

std::string Rendezvous::title(const Call& call, const Posting& own) const {
  return fmt::format("{} '{}' of {} bytes, call {} of {}", name_of(own.operation), own.label, own.bytes, call.sequence,
                     name_);
}

}  // namespace farspan
