// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/hub.h"

#include <algorithm>
#include <poll.h>
#include <utility>

#include "comm/deadline.h"
#include "comm/mpi/wire.h"

namespace farspan {
namespace {

// From a failure to the verdict: time for the ranks to leave what they do and tidy up. A launcher that sees a process
// die gives the others a second.
constexpr double kGraceSeconds = 2;
constexpr double kGraceAfterLossSeconds = 0.2;
// Some have ended a run and others not: told after this long, which ordinary differences between ranks stay under.
constexpr double kEndedSeconds = 0.5;
constexpr double kReportSeconds = 1;
constexpr double kClosingSeconds = 5;
constexpr int kPollMilliseconds = 50;

constexpr int64_t kReportedOperations = 2;  // of each rank: the call in hand and the one before it
constexpr size_t kReportedRanks = 32;
constexpr size_t kDescribedRanks = 4;

}  // namespace

Hub::Hub(int size, std::string key) : size_(size), key_(std::move(key)), listener_(listen_anywhere(&port_)) {
  thread_ = std::thread([this] { run(); });
}

Hub::~Hub() {
  closing_ = true;
  thread_.join();
}

void Hub::run() {
  std::optional<Clock::time_point> last_moment;
  while (true) {
    wait_for_frames();
    accept_all();
    for (Peer& peer : peers_) read(peer);
    keep_times();
    if (!closing_) continue;
    if (!last_moment) last_moment = deadline_after(kClosingSeconds);
    const bool all_gone = std::none_of(peers_.begin(), peers_.end(),
                                       [](const Peer& peer) { return peer.info && peer.socket.open() && !peer.left; });
    if (all_gone || Clock::now() >= *last_moment) return;
  }
}

void Hub::wait_for_frames() {
  std::vector<pollfd> descriptors = {{.fd = listener_.descriptor(), .events = POLLIN, .revents = 0}};
  for (const Peer& peer : peers_)
    if (peer.socket.open()) descriptors.push_back({.fd = peer.socket.descriptor(), .events = POLLIN, .revents = 0});
  poll(descriptors.data(), descriptors.size(), kPollMilliseconds);
}

void Hub::accept_all() {
  while (true) {
    Socket socket = accept_from(listener_);
    if (!socket.open()) return;
    peers_.emplace_back().socket = std::move(socket);
  }
}

void Hub::read(Peer& peer) {
  if (!peer.socket.open()) return;
  try {
    const bool open = peer.frames.fill(peer.socket);
    while (const std::optional<Frame> frame = peer.frames.next()) handle(peer, *frame);
    if (!open) lose(peer);
  } catch (const CommunicationError&) {
    lose(peer);  // bytes that are no frames
  }
}

void Hub::handle(Peer& peer, const Frame& frame) {
  if (!peer.info) {
    WireReader reader(frame.payload);
    if (frame.type != frame::hello || reader.text() != key_) throw CommunicationError("not of this job");
    peer.info = decode_process_info(reader.text());
    send_frame(peer.socket, frame::known, "");
    greet_all();
    return;
  }
  switch (frame.type) {
    case frame::failure:
      on_failure(peer, decode_failure(frame.payload), kGraceSeconds);
      break;
    case frame::over:
      peer.over = true;
      peer.ended_run = std::max(peer.ended_run, WireReader(frame.payload).number());
      on_ended(peer.ended_run);
      break;
    case frame::dump:
      peer.dump = decode_dump(frame.payload);
      break;
    case frame::report_request:
      report_wanted_.push_back(peer.info->rank);
      report_due_ = deadline_after(kReportSeconds);
      for (Peer& each : peers_) each.dump.reset();
      broadcast(frame::dump_request, "");
      break;
    case frame::bye:
      peer.left = true;
      break;
    default:
      throw CommunicationError("a frame of unknown type");
  }
}

void Hub::greet_all() {
  std::vector<std::string> infos(static_cast<size_t>(size_));
  int known = 0;
  for (const Peer& peer : peers_) {
    if (!peer.info) continue;
    infos.at(static_cast<size_t>(peer.info->rank)) = encode(*peer.info);
    ++known;
  }
  if (known < size_) return;
  greeted_ = true;
  broadcast(frame::welcome, encode(infos));
}

void Hub::lose(Peer& peer) {
  peer.socket.close();
  if (!peer.info || peer.left) return;
  peer.over = true;
  if (pronounced_) return;
  RankFailure failure;
  failure.rank = peer.info->rank;
  failure.kind = ErrorKind::communication;
  failure.message = fmt::format("process {} on host {} ended without a word: it was killed or has crashed",
                                peer.info->pid, peer.info->host);
  on_failure(peer, std::move(failure), kGraceAfterLossSeconds);
}

void Hub::on_failure(Peer& peer, RankFailure failure, double grace_seconds) {
  peer.over = true;
  if (!peer.failure) peer.failure = failure;
  if (first_ && (!first_->consequence || failure.consequence)) return;
  const bool news = !first_;
  first_ = std::move(failure);
  if (!news) return;
  grace_seconds_ = grace_seconds;
  verdict_due_ = deadline_after(grace_seconds);
  for (Peer& each : peers_) {
    each.dump.reset();
    if (&each != &peer) each.over = !each.socket.open();
  }
  broadcast(frame::failed, encode(*first_));
}

// Tells all when everybody has ended the run; when only some have, a little later, who.
void Hub::on_ended(int64_t run) {
  if (static_cast<int>(ended_ranks(run).size()) == size_) {
    announced_run_ = std::max(announced_run_, run);
    ended_due_.reset();
    broadcast(frame::ended, encode(run, ended_ranks(run)));
  } else if (run > announced_run_) {
    ended_due_ = deadline_after(kEndedSeconds);
  }
}

void Hub::keep_times() {
  const Clock::time_point now = Clock::now();
  if (ended_due_ && now >= *ended_due_) {
    ended_due_.reset();
    broadcast(frame::ended, encode(announced_run_ + 1, ended_ranks(announced_run_ + 1)));
  }
  const bool all_dumped = std::all_of(peers_.begin(), peers_.end(),
                                      [](const Peer& peer) { return peer.dump || !peer.socket.open() || !peer.info; });
  if (!report_wanted_.empty() && (all_dumped || now >= report_due_)) {
    const std::string text = report();
    for (int rank : report_wanted_) send_frame(with_rank(rank)->socket, frame::report, text);
    report_wanted_.clear();
  }
  if (first_ && !pronounced_ && verdict_is_due()) pronounce();
}

bool Hub::verdict_is_due() const {
  if (Clock::now() >= verdict_due_) return true;
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return !peer.info || !peer.socket.open() || (peer.over && peer.dump); });
}

void Hub::pronounce() {
  pronounced_ = true;
  Verdict verdict{.kind = first_->kind, .message = verdict_message(), .report = {}};
  for (Peer& peer : peers_) {
    if (!peer.info || !peer.socket.open()) continue;
    // The one that shows it.
    const bool shows = peer.info->rank == 0 && verdict.kind == ErrorKind::communication;
    verdict.report = shows ? report() : "";
    send_frame(peer.socket, frame::verdict, encode(verdict));
  }
}

std::string Hub::verdict_message() const {
  const Peer* rank_0 = with_rank(0);
  // What is wrong in every process alike, such as a bad key in the configuration, is no rank's own.
  const bool common =
      first_->outside && (first_->rank == 0 || (rank_0 != nullptr && rank_0->failure && rank_0->failure->outside &&
                                                rank_0->failure->message == first_->message));
  std::string text = common ? first_->message : fmt::format("rank {}: {}", first_->rank, first_->message);

  for (size_t i = 0; i < std::min(first_->missing.size(), kDescribedRanks); ++i) {
    const Peer* missing = with_rank(first_->missing[i]);
    if (missing != nullptr && missing->dump)
      text += fmt::format("; rank {} {}", first_->missing[i], missing->dump->whereabouts);
  }
  std::string stuck;
  for (const Peer& peer : peers_) {
    if (!peer.info || !peer.socket.open() || peer.over) continue;
    stuck += fmt::format("{}rank {}", stuck.empty() ? "" : ", ", peer.info->rank);
    const bool told = std::count(first_->missing.begin(), first_->missing.end(), peer.info->rank) > 0;
    if (peer.dump && !told) stuck += fmt::format(" ({})", peer.dump->whereabouts);
  }
  if (!stuck.empty()) text += fmt::format("; did not stop within {} s after that: {}", grace_seconds_, stuck);
  return text;
}

std::string Hub::report() const {
  std::vector<RankDump> dumps;
  std::string gone;
  for (int rank = 0; rank < size_; ++rank) {
    const Peer* peer = with_rank(rank);
    if (peer != nullptr && peer->dump) dumps.push_back(*peer->dump);
    if (peer == nullptr || !peer->socket.open()) gone += fmt::format("rank {}'s process is gone\n", rank);
  }
  std::string text = merged_report(dumps, dumps.size() <= kReportedRanks ? kReportedOperations : 0);
  return text + gone;
}

void Hub::broadcast(int type, std::string_view payload) {
  for (Peer& peer : peers_)
    if (peer.info && peer.socket.open()) send_frame(peer.socket, type, payload);
}

Hub::Peer* Hub::with_rank(int rank) { return const_cast<Peer*>(std::as_const(*this).with_rank(rank)); }

const Hub::Peer* Hub::with_rank(int rank) const {
  const auto found = std::find_if(peers_.begin(), peers_.end(),
                                  [rank](const Peer& peer) { return peer.info && peer.info->rank == rank; });
  return found == peers_.end() ? nullptr : &*found;
}

std::vector<int> Hub::ended_ranks(int64_t run) const {
  std::vector<int> ranks;
  for (const Peer& peer : peers_)
    if (peer.info && peer.ended_run >= run) ranks.push_back(peer.info->rank);
  return ranks;
}

}  // namespace farspan
