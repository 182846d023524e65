// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/processes.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <poll.h>
#include <sstream>
#include <unistd.h>

#include "base/log.h"
#include "comm/deadline.h"
#include "comm/mpi/backoff.h"
#include "comm/mpi/this_process.h"
#include "comm/mpi/wire.h"

namespace farspan {
namespace {

constexpr double kJoinSeconds = 60;
constexpr double kConnectSeconds = 3;
constexpr int64_t kAddressBytes = 4096;
constexpr int kServePollMilliseconds = 100;

// After the verdict: rank 0 has this long to show it itself, any process to be gone.
constexpr double kShowSeconds = 0.5;
constexpr double kLeaveSeconds = 5;
// From the last line to the end of the process that wrote it; the others stay a little longer.
constexpr double kReadSeconds = 0.1;

// After SIGTERM: time for the failure that a launcher sent it for to be told.
constexpr double kTerminationSeconds = 0.5;
// A verdict comes within the hub's grace; a hub that says nothing for so long is gone too.
constexpr double kVerdictSeconds = 10;

// A launcher that sees one process die sends the others SIGTERM at once; they stay for as long as it takes to say who
// died. Where the program has a use of its own for the signal, that stands.
std::atomic<bool> termination_asked = false;
extern "C" void note_termination(int) { termination_asked = true; }

void catch_termination() {
  struct sigaction present {};
  if (sigaction(SIGTERM, nullptr, &present) == 0 && present.sa_handler == SIG_DFL)
    std::signal(SIGTERM, note_termination);
}

}  // namespace

Processes::Processes(const std::string& launcher, int expected) {
  if (size() != expected) {
    // Every process would take itself for the whole job and write over the others.
    library_.abandon();
    throw ConfigError(fmt::format(
        "{}, but {}, which this program is built with, sees a world of {}; start with that library's own mpirun (under "
        "Slurm: srun --mpi=pmix), or one process without a launcher and with --ranks {}",
        launcher.empty() ? "this process was started alone" : launcher, library_.version(), size(), expected));
  }
  groups_with_.resize(static_cast<size_t>(size()));
  ended_run_.resize(static_cast<size_t>(size()));
  parent_ = getppid();
  catch_termination();
  try {
    std::string addresses;
    share_hub_address(&addresses);
    connect(addresses);
  } catch (...) {
    library_.abandon();
    throw;
  }
  thread_ = std::thread([this] { serve(); });
}

Processes::~Processes() {
  leaving_ = true;
  if (!failed()) send(frame::bye, "");
  hub_.reset();
  thread_.join();
}

// From rank 0 to all, over MPI: the job's key, the hub's port, and the addresses it may be reached by.
void Processes::share_hub_address(std::string* addresses) {
  constexpr int kTag = 0;
  std::string text(kAddressBytes, '\0');
  std::vector<MpiLibrary::Request> requests;
  if (rank() == 0) {
    const std::string key = random_key();
    hub_ = std::make_unique<Hub>(size(), key);
    WireWriter writer;
    writer.text(key).text(loopback_key()).text(this_process(rank()).host).number(hub_->port());
    writer.text(encode(addresses_of_this_host()));
    FARSPAN_CHECK(std::ssize(writer.bytes()) <= kAddressBytes, "this host has too many addresses");
    text.replace(0, writer.bytes().size(), writer.bytes());
    for (int peer = 1; peer < size(); ++peer) requests.push_back(library_.send(peer, kTag, text.data(), kAddressBytes));
  } else {
    requests.push_back(library_.receive(0, kTag, text.data(), kAddressBytes));
  }
  const Clock::time_point deadline = deadline_after(kJoinSeconds);
  Backoff backoff;
  for (MpiLibrary::Request& request : requests) {
    while (!library_.test(request)) {
      if (Clock::now() >= deadline)
        throw CommunicationError(fmt::format("rank {}: MPI moved no message to or from rank 0 within {} s of the start",
                                             rank(), kJoinSeconds));
      backoff.pause();
    }
  }
  *addresses = text;
}

void Processes::connect(const std::string& text) {
  WireReader reader(text);
  const std::string key = reader.text();
  const bool loopback = reader.text() == loopback_key();
  const std::string host = reader.text();
  const int port = static_cast<int>(reader.number());
  std::vector<std::string> addresses = decode_texts(reader.text());
  if (loopback) addresses.insert(addresses.begin(), {"127.0.0.1", "::1"});

  const Clock::time_point deadline = deadline_after(kJoinSeconds);
  const std::string hello = WireWriter().text(key).text(encode(this_process(rank()))).bytes();
  for (const std::string& address : addresses) {
    socket_ = connect_to(address, port, kConnectSeconds);
    // Another program that listens at the address does not know us.
    if (!socket_.open() || !send_frame(socket_, frame::hello, hello) ||
        !await_frame(frame::known, deadline_after(kConnectSeconds)))
      continue;
    const std::optional<std::string> all = await_frame(frame::welcome, deadline);
    if (!all) break;
    for (const std::string& info : decode_texts(*all)) infos_.push_back(decode_process_info(info));
    return;
  }
  throw CommunicationError(
      fmt::format("rank {} on host {} cannot reach rank 0's process on host {}, port {} at any of its addresses ({}), "
                  "or not all processes came within {} s; the hosts must accept TCP connections from each other",
                  rank(), this_process(rank()).host, host, port, fmt::join(addresses, ", "), kJoinSeconds));
}

// The payload of the next frame, which must be of this type; before the thread runs.
std::optional<std::string> Processes::await_frame(int type, Clock::time_point deadline) {
  for (bool open = true; open && Clock::now() < deadline;) {
    if (const std::optional<Frame> frame = frames_.next())
      return frame->type == type ? std::optional(frame->payload) : std::nullopt;
    pollfd readable = {.fd = socket_.descriptor(), .events = POLLIN, .revents = 0};
    poll(&readable, 1, kServePollMilliseconds);
    open = frames_.fill(socket_);
  }
  frames_ = FrameReader();
  return std::nullopt;
}

std::vector<int> Processes::ranks_of_this_host() const {
  std::vector<int> ranks;
  for (const ProcessInfo& info : infos_)
    if (info.host_key == infos_[static_cast<size_t>(rank())].host_key) ranks.push_back(info.rank);
  return ranks;
}

int Processes::threads() const {
  const std::string& mine = infos_[static_cast<size_t>(rank())].cpus;
  const std::vector<int> neighbours = ranks_of_this_host();
  double share = 0;
  for (size_t cpu = 0; cpu < mine.size(); ++cpu) {
    if (mine[cpu] != '1') continue;
    int users = 0;
    for (int neighbour : neighbours) {
      const std::string& theirs = infos_[static_cast<size_t>(neighbour)].cpus;
      users += cpu < theirs.size() && theirs[cpu] == '1';
    }
    share += 1.0 / users;
  }
  constexpr double kRounding = 1e-6;
  return std::max(1, static_cast<int>(share + kRounding));
}

void Processes::begin_run() {
  const std::lock_guard lock(mutex_);
  ++run_;
  rank_ended_ = false;
}

void Processes::end_run(double timeout_seconds) {
  rank_ended_ = true;
  int64_t run = 0;
  {
    const std::lock_guard lock(mutex_);
    run = run_;
  }
  send(frame::over, WireWriter().number(run).bytes());
  const Clock::time_point deadline = deadline_after(timeout_seconds);
  Backoff backoff;
  while (true) {
    if (const std::optional<RankFailure> first = failure())
      throw PeerFailure(fmt::format("stopped because rank {} failed: {}", first->rank, first->message));
    std::vector<int> missing;
    for (int peer = 0; peer < size(); ++peer)
      if (!has_ended(peer)) missing.push_back(peer);
    if (missing.empty()) return;
    if (Clock::now() >= deadline)
      throw WaitFailure(fmt::format("rank {} has ended its work and waited {} s for ranks [{}] to end theirs", rank(),
                                    timeout_seconds, fmt::join(missing, ", ")),
                        missing);
    library_.progress();  // what this rank sent may need it
    backoff.pause();
  }
}

bool Processes::has_ended(int rank) const {
  const std::lock_guard lock(mutex_);
  return ended_run_[static_cast<size_t>(rank)] >= run_;
}

void Processes::fail(RankFailure failure) {
  {
    const std::lock_guard lock(mutex_);
    rank_ended_ = true;
    told_ = true;
    if (!failure_) failure_ = failure;
    failed_ = true;
  }
  send(frame::failure, encode(failure));
  changed_.notify_all();
}

std::optional<RankFailure> Processes::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

Verdict Processes::verdict() {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline_after(kVerdictSeconds), [this] { return verdict_.has_value(); });
  verdict_taken_ = true;
  if (verdict_) return *verdict_;
  return {
      .kind = failure_->kind, .message = fmt::format("rank {}: {}", failure_->rank, failure_->message), .report = {}};
}

std::string Processes::report() {
  std::unique_lock lock(mutex_);
  report_.reset();
  lock.unlock();
  send(frame::report_request, "");
  lock.lock();
  changed_.wait_until(lock, deadline_after(kVerdictSeconds), [this] { return report_ || hub_lost_; });
  return report_.value_or("rank 0's process, which collects the reports, is gone\n");
}

void Processes::finish() {
  constexpr double kFinishSeconds = 600;
  begin_run();
  end_run(kFinishSeconds);
  library_.leave();
}

void Processes::leave(RankFailure failure) {
  library_.abandon();
  failure.outside = true;
  if (!told_) fail(std::move(failure));  // a failure of the rank itself was told when it left its work
  const Verdict final_verdict = verdict();
  std::unique_lock lock(mutex_);
  if (!shows_verdict()) {
    // After rank 0 has shown it.
    changed_.wait_until(lock, deadline_after(kLeaveSeconds), [this] { return hub_lost_; });
    std::this_thread::sleep_for(std::chrono::duration<double>(2 * kReadSeconds));
    std::_Exit(static_cast<int>(final_verdict.kind));
  }
  show_and_exit(final_verdict);
}

// Rank 0's process; the next one where that is what failed. With mutex_ held.
bool Processes::shows_verdict() const { return rank() == 0 || (rank() == 1 && own_verdict_); }

void Processes::show_and_exit(const Verdict& verdict) const {
  std::fflush(stdout);
  std::istringstream lines(verdict.report);
  for (std::string line; std::getline(lines, line);) fmt::print(stderr, "farspan: {}\n", one_line(line));
  fmt::print(stderr, "farspan: error: {}\n", one_line(verdict.message));
  std::fflush(stderr);
  // A launcher that is ending the job stops reading once its processes are gone.
  std::this_thread::sleep_for(std::chrono::duration<double>(kReadSeconds));
  std::_Exit(static_cast<int>(verdict.kind));
}

// --- the thread ---

void Processes::serve() {
  while (!leaving_) {
    pollfd readable = {.fd = socket_.descriptor(), .events = POLLIN, .revents = 0};
    const bool connected = [this] {
      const std::lock_guard lock(mutex_);
      return !hub_lost_;
    }();
    if (connected)
      poll(&readable, 1, kServePollMilliseconds);
    else
      usleep(kServePollMilliseconds * 1000);
    if (connected && !read_frames()) lose_hub();
    watch_launcher();
    obey_termination();
    end_if_stuck();
  }
}

bool Processes::read_frames() {
  try {
    const bool open = frames_.fill(socket_);
    while (const std::optional<Frame> frame = frames_.next()) handle(*frame);
    return open;
  } catch (const CommunicationError&) {
    return false;
  }
}

void Processes::handle(const Frame& frame) {
  if (frame.type == frame::failed || frame.type == frame::dump_request) {
    if (frame.type == frame::failed) {
      const std::lock_guard lock(mutex_);
      failure_ = decode_failure(frame.payload);
      failed_ = true;
    }
    send(frame::dump, encode(dump_of(rank(), recorder_, rank_ended_)));
    return;
  }
  const std::lock_guard lock(mutex_);
  if (frame.type == frame::ended) {
    const auto [run, ranks] = decode_numbered_ranks(frame.payload);
    for (int ended : ranks) ended_run_[static_cast<size_t>(ended)] = run;
  } else if (frame.type == frame::verdict) {
    verdict_ = decode_verdict(frame.payload);
    verdict_at_ = Clock::now();
  } else if (frame.type == frame::report) {
    report_ = frame.payload;
  }
  changed_.notify_all();
}

// Without rank 0's process the job cannot go on, and nobody else will pronounce a verdict.
void Processes::lose_hub() {
  if (leaving_) return;
  const std::lock_guard lock(mutex_);
  hub_lost_ = true;
  if (!verdict_) {
    RankFailure failure;
    failure.kind = ErrorKind::communication;
    failure.message = fmt::format("process {} on host {} ended without a word: it was killed or has crashed",
                                  infos_[0].pid, infos_[0].host);
    verdict_ = {.kind = failure.kind, .message = "rank 0: " + failure.message, .report = {}};
    verdict_at_ = Clock::now();
    own_verdict_ = true;
    failure_ = std::move(failure);
    failed_ = true;
  }
  changed_.notify_all();
}

// A launcher that is killed outright leaves its processes behind.
void Processes::watch_launcher() {
  if (failed() || size() == 1 || getppid() == parent_) return;
  fail({.rank = rank(),
        .kind = ErrorKind::communication,
        .message = fmt::format("the launcher (process {}) is gone", parent_),
        .consequence = false,
        .missing = {},
        .outside = false});
}

void Processes::obey_termination() {
  if (!termination_asked || failed()) return;
  if (!termination_due_) termination_due_ = deadline_after(kTerminationSeconds);
  if (Clock::now() < *termination_due_) return;
  fail({.rank = rank(),
        .kind = ErrorKind::communication,
        .message = "ended by SIGTERM",
        .consequence = false,
        .missing = {},
        .outside = true});
}

// The rank may be in an endless loop, or in a call that nothing interrupts.
void Processes::end_if_stuck() {
  std::unique_lock lock(mutex_);
  if (!verdict_) return;
  const double since = std::chrono::duration<double>(Clock::now() - verdict_at_).count();
  const bool shows = shows_verdict();
  const Verdict final_verdict = *verdict_;
  if (shows && !verdict_taken_ && since > kShowSeconds) {
    lock.unlock();
    show_and_exit(final_verdict);
  }
  if (since > kLeaveSeconds || (hub_lost_ && !shows && since > kShowSeconds))
    std::_Exit(static_cast<int>(final_verdict.kind));
}

void Processes::send(int type, std::string_view payload) {
  const std::lock_guard lock(send_mutex_);
  send_frame(socket_, type, payload);  // a hub that is gone is noticed by reading
}

}  // namespace farspan
