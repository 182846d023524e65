// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/mpi_world.h"

#include <algorithm>

#include "comm/cuda/lone_cuda_communicator.h"
#include "comm/deadline.h"
#include "comm/mpi/backoff.h"
#include "comm/mpi/mpi_communicator.h"
#include "comm/nccl/nccl_communicator.h"

namespace farspan {
namespace {

// Data that a rank sent before it ended its work has arrived by then.
constexpr double kQuietSeconds = 1;

}  // namespace

MpiWorld::MpiWorld(Processes& processes, double timeout_seconds)
    : processes_(processes), library_(processes.mpi()), timeout_seconds_(timeout_seconds) {
  FARSPAN_CHECK(timeout_seconds > 0, "a time-out of {} s; above 0", timeout_seconds);
}

std::unique_ptr<Communicator> MpiWorld::group(int world_rank, std::vector<int> ranks, Dimension dimension) {
  return host_group(world_rank, std::move(ranks), dimension);
}

std::unique_ptr<Communicator> MpiWorld::group(int world_rank, std::vector<int> ranks, Dimension dimension,
                                              Device& device) {
  if (!device.on_cuda()) return group(world_rank, std::move(ranks), dimension);
  if (ranks.size() == 1) return make_lone_cuda_communicator(dimension, world_rank, device);
  return make_nccl_communicator(host_group(world_rank, std::move(ranks), dimension), *this, device, timeout_seconds_);
}

int MpiWorld::gpu_of(int world_rank) const {
  const std::vector<int> neighbours = processes_.ranks_of_this_host();
  const auto place = std::find(neighbours.begin(), neighbours.end(), world_rank);
  FARSPAN_CHECK(place != neighbours.end(), "rank {} is on another machine", world_rank);
  return gpu_of_place(static_cast<int>(place - neighbours.begin()));
}

std::unique_ptr<CallCommunicator> MpiWorld::host_group(int world_rank, std::vector<int> ranks, Dimension dimension) {
  FARSPAN_CHECK(world_rank == processes_.rank(), "rank {} is not this process's, which is {}", world_rank,
                processes_.rank());
  MpiGroup group;
  group.rank = place_in_group(world_rank, ranks, dimension);
  group.name = group_name(dimension, ranks);
  for (int peer : ranks) {
    const int64_t range = peer == world_rank ? 0 : processes_.next_group_with(peer);
    FARSPAN_CHECK((range + 1) * MpiGroup::kTags <= library_.highest_tag(),
                  "{}: {} gives tags for {} groups of the same two ranks", group.name, library_.version(),
                  library_.highest_tag() / MpiGroup::kTags);
    group.first_tags.push_back(static_cast<int>(range) * MpiGroup::kTags);
  }
  group.ranks = std::move(ranks);
  return std::make_unique<MpiCommunicator>(*this, std::move(group), dimension);
}

void MpiWorld::set_position(int, std::string position) { processes_.recorder().set_position(std::move(position)); }

void MpiWorld::abort(int world_rank, const std::string& reason) {
  processes_.fail({.rank = world_rank,
                   .kind = ErrorKind::communication,
                   .message = reason,
                   .consequence = false,
                   .missing = {},
                   .outside = false});
}

std::unique_ptr<MpiCall> MpiWorld::start(MpiGroup& group, CallArguments call) {
  throw_if_stopped();
  const auto of_group = [&group](const MpiCall* open) { return &open->group() == &group; };
  FARSPAN_CHECK(std::count_if(open_.begin(), open_.end(), of_group) < MpiGroup::kOpenCalls,
                "{} '{}': {} calls of {} are open already", name_of(call.operation), call.label, MpiGroup::kOpenCalls,
                group.name);
  const int64_t sequence = group.calls++;
  const int64_t ticket = processes_.recorder().record(group.name, sequence, call.operation, call.label, call.bytes);
  auto started = std::make_unique<MpiCall>(library_, group, std::move(call), sequence);
  started->ticket = ticket;
  open_.push_back(started.get());
  progress();
  if (!disagreement_.empty()) {
    give_up(*started);
    throw CommunicationError(disagreement_);
  }
  return started;
}

void MpiWorld::wait(MpiCall& call) {
  Recorder& recorder = processes_.recorder();
  recorder.set_progress(call.ticket, CallProgress::waiting);
  const Clock::time_point deadline = deadline_after(timeout_seconds_);
  Clock::time_point last_step = Clock::now();
  Backoff backoff;
  try {
    while (!call.complete()) {
      throw_if_stopped();
      const bool advanced = progress();
      throw_if_stopped();
      const Clock::time_point now = Clock::now();
      if (advanced) {
        last_step = now;
        backoff.reset();
        continue;
      }
      if (now - last_step > std::chrono::duration<double>(kQuietSeconds)) throw_if_peer_ended(call);
      if (now >= deadline) throw_timeout(call);
      backoff.pause();
    }
  } catch (...) {
    give_up(call);
    throw;
  }
  recorder.set_progress(call.ticket, CallProgress::done);
  close(call);
}

void MpiWorld::give_up(MpiCall& call) {
  processes_.recorder().set_progress(call.ticket, CallProgress::failed);
  library_.abandon();
  close(call);
}

void MpiWorld::fail_unwaited(MpiCall& call) {
  processes_.fail({.rank = processes_.rank(),
                   .kind = ErrorKind::internal,
                   .message = call.title() + ": its Work was destroyed without a wait",
                   .consequence = false,
                   .missing = {},
                   .outside = false});
  give_up(call);
}

void MpiWorld::close(MpiCall& call) {
  open_.erase(std::remove(open_.begin(), open_.end(), &call), open_.end());
  if (staging_.user == &call) staging_.release();
}

bool MpiWorld::progress() {
  bool advanced = false;
  try {
    for (MpiCall* call : open_) advanced |= call->advance(library_, staging_);
  } catch (const CommunicationError& error) {
    disagreement_ = error.what();
  }
  return advanced;
}

void MpiWorld::throw_if_stopped() const {
  if (!disagreement_.empty()) throw CommunicationError(disagreement_);
  if (const std::optional<RankFailure> failure = processes_.failed() ? processes_.failure() : std::nullopt)
    throw PeerFailure(fmt::format("stopped because rank {} failed: {}", failure->rank, failure->message));
  if (library_.abandoned()) throw CommunicationError("an earlier call of this rank has failed");
}

void MpiWorld::throw_if_peer_ended(const MpiCall& call) const {
  for (const MpiCall::Laggard& laggard : call.laggards()) {
    if (!processes_.has_ended(laggard.world_rank)) continue;
    throw WaitFailure(fmt::format("{}: rank {} waits for rank {}, which has ended its work", call.title(),
                                  processes_.rank(), laggard.world_rank),
                      {laggard.world_rank});
  }
}

void MpiWorld::throw_timeout(const MpiCall& call) const {
  std::string missing;
  std::vector<int> ranks;
  for (const MpiCall::Laggard& laggard : call.laggards()) {
    missing += fmt::format("{}rank {} has not {}", missing.empty() ? "" : ", ", laggard.world_rank,
                           laggard.come ? "finished" : "come");
    ranks.push_back(laggard.world_rank);
  }
  throw WaitFailure(
      fmt::format("{}: rank {} waited {} s: {}", call.title(), processes_.rank(), timeout_seconds_, missing), ranks);
}

void run_process_rank(Processes& processes, double timeout_seconds, const RankBody& body) {
  MpiWorld world(processes, timeout_seconds);
  processes.begin_run();
  try {
    body(processes.rank(), world);
    processes.end_run(timeout_seconds);
  } catch (...) {
    processes.mpi().abandon();
    processes.fail(failure_of(processes.rank(), std::current_exception()));
    const Verdict verdict = processes.verdict();
    throw_error(verdict.kind, verdict.message);
  }
}

}  // namespace farspan
