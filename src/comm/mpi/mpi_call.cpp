// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/mpi_call.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "comm/call_text.h"

namespace farspan {
namespace {

// Bytes of a piece that is received into place: large enough that its start costs nothing, and counted in an int.
constexpr int64_t kPieceBytes = int64_t{16} << 20;

void copy_bytes(std::byte* target, const std::byte* source, int64_t bytes) {
  if (bytes > 0 && target != source) std::memcpy(target, source, static_cast<size_t>(bytes));
}

const std::byte* data_of(const Message& message) { return static_cast<const std::byte*>(message.data.raw()); }

}  // namespace

MpiCall::Peer::Peer(const MpiGroup& group, int member_of_group, int64_t sequence, int64_t first_piece_bytes)
    : member(member_of_group),
      first_send(Flow::Direction::send, group.world_rank(member), group.data_tag(member, sequence, 0),
                 first_piece_bytes),
      first_receive(Flow::Direction::receive, group.world_rank(member), group.data_tag(member, sequence, 0),
                    first_piece_bytes),
      second_send(Flow::Direction::send, group.world_rank(member), group.data_tag(member, sequence, 1), kPieceBytes),
      second_receive(Flow::Direction::receive, group.world_rank(member), group.data_tag(member, sequence, 1),
                     kPieceBytes) {}

MpiCall::MpiCall(MpiLibrary& library, const MpiGroup& group, CallArguments call, int64_t sequence)
    : group_(group), call_(std::move(call)), sequence_(sequence) {
  if (call_.operation == Operation::exchange) check_messages_to_oneself();
  if (!call_.announced) copy_own_part();
  make_peers(sequence);
  if (reduces()) make_reduction(sequence);
  for (Peer& peer : peers_) {
    const int process = group_.world_rank(peer.member);
    const int tag = group_.header_tag(peer.member);
    peer.mine = header_for(call_, group_.name, sequence, peer.member);
    peer.receive_header = library.receive(process, tag, &peer.theirs, sizeof(peer.theirs));
    peer.send_header = library.send(process, tag, &peer.mine, sizeof(peer.mine));
    if (!call_.announced) add_flows(peer);
    peer.first_send.advance(library);
  }
}

bool MpiCall::reduces() const {
  if (call_.announced) return false;
  return call_.operation == Operation::all_reduce || call_.operation == Operation::reduce_scatter;
}

void MpiCall::make_peers(int64_t sequence) {
  std::set<int> members;
  if (call_.operation == Operation::exchange) {
    for (const Message& message : call_.sends) members.insert(message.peer);
    for (const Message& message : call_.receives) members.insert(message.peer);
  } else {
    for (int member = 0; member < group_.size(); ++member) members.insert(member);
  }
  members.erase(group_.rank);
  const int64_t piece = reduces() ? RankOrderReduction::piece_bytes(group_.size()) : kPieceBytes;
  // From the next rank on, so that the ranks do not all begin with the same one.
  for (int step = 1; step < group_.size(); ++step) {
    const int member = (group_.rank + step) % group_.size();
    if (members.contains(member)) peers_.emplace_back(group_, member, sequence, piece);
  }
}

// What goes to the peer and comes from it, but for the stretches that a reduction receives.
void MpiCall::add_flows(Peer& peer) {
  const int64_t element = size_of(call_.dtype);
  const int64_t equal_piece = call_.bytes / group_.size();  // of all_to_all and reduce_scatter
  switch (call_.operation) {
    case Operation::all_reduce: {
      const Segment theirs = segment_of(call_.bytes / element, peer.member, group_.size());
      const Segment own = segment_of(call_.bytes / element, group_.rank, group_.size());
      peer.first_send.add(call_.source + theirs.begin * element, theirs.count * element);
      peer.second_send.add(call_.target + own.begin * element, own.count * element);
      peer.second_receive.add(call_.target + theirs.begin * element, theirs.count * element);
      break;
    }
    case Operation::all_gather:
      peer.first_send.add(call_.source, call_.bytes);
      peer.first_receive.add(call_.target + peer.member * call_.bytes, call_.bytes);
      break;
    case Operation::reduce_scatter:
      peer.first_send.add(call_.source + peer.member * equal_piece, equal_piece);
      break;
    case Operation::all_to_all:
      peer.first_send.add(call_.source + peer.member * equal_piece, equal_piece);
      peer.first_receive.add(call_.target + peer.member * equal_piece, equal_piece);
      break;
    case Operation::exchange:
      for (const Message& message : call_.sends)
        if (message.peer == peer.member) peer.first_send.add(data_of(message), message.data.bytes());
      for (const Message& message : call_.receives)
        if (message.peer == peer.member) peer.first_receive.add(data_of(message), message.data.bytes());
      break;
    case Operation::barrier:
      break;
  }
}

void MpiCall::copy_own_part() const {
  if (call_.operation == Operation::all_gather)
    copy_bytes(call_.target + group_.rank * call_.bytes, call_.source, call_.bytes);
  if (call_.operation == Operation::all_to_all) {
    const int64_t piece = call_.bytes / group_.size();
    copy_bytes(call_.target + group_.rank * piece, call_.source + group_.rank * piece, piece);
  }
  if (call_.operation == Operation::exchange) copy_messages_to_oneself();
}

void MpiCall::check_messages_to_oneself() const {
  const CallHeader own = header_for(call_, group_.name, sequence_, group_.rank);
  const int world_rank = group_.world_rank(group_.rank);
  if (const std::optional<std::string> found = disagreement({world_rank, own}, {world_rank, own}, group_.name))
    throw CommunicationError(*found);
}

void MpiCall::copy_messages_to_oneself() const {
  const auto to_oneself = [this](const Message& message) { return message.peer == group_.rank; };
  auto send = call_.sends.begin();
  for (const Message& receive : call_.receives) {
    if (!to_oneself(receive)) continue;
    send = std::find_if(send, call_.sends.end(), to_oneself);
    copy_bytes(static_cast<std::byte*>(receive.data.raw()), data_of(*send), receive.data.bytes());
    ++send;
  }
}

void MpiCall::make_reduction(int64_t sequence) {
  const int64_t element = size_of(call_.dtype);
  Segment own = segment_of(call_.bytes / element, group_.rank, group_.size());
  if (call_.operation == Operation::reduce_scatter) {
    own.count = call_.bytes / element / group_.size();
    own.begin = group_.rank * own.count;
  }
  std::vector<RankOrderReduction::Source> sources;
  for (int member = 0; member < group_.size(); ++member) {
    if (member == group_.rank)
      sources.push_back({.peer = 0, .tag = 0, .own = call_.source + own.begin * element});
    else
      sources.push_back(
          {.peer = group_.world_rank(member), .tag = group_.data_tag(member, sequence, 0), .own = nullptr});
  }
  std::byte* out = call_.target + (call_.operation == Operation::all_reduce ? own.begin * element : 0);
  reduction_.emplace(call_.dtype, std::move(sources), own.count * element, out);
}

bool MpiCall::advance(MpiLibrary& library, Staging& staging) {
  bool advanced = false;
  for (Peer& peer : peers_) advanced |= advance_peer(library, peer);
  if (reduction_ && !reduction_->done()) advanced |= advance_reduction(library, staging);
  if (reduction_ && reduction_->done()) advanced |= advance_second(library);
  return advanced;
}

bool MpiCall::advance_peer(MpiLibrary& library, Peer& peer) {
  bool advanced = false;
  if (!peer.header_sent) advanced |= peer.header_sent = library.test(peer.send_header);
  advanced |= peer.first_send.advance(library);
  if (!peer.header_received && library.test(peer.receive_header)) {
    peer.header_received = true;
    advanced = true;
    check_header(peer);
  }
  if (peer.header_received) advanced |= peer.first_receive.advance(library);
  return advanced;
}

bool MpiCall::advance_reduction(MpiLibrary& library, Staging& staging) {
  for (const Peer& peer : peers_)
    if (!peer.header_received) return false;
  std::byte* memory = staging.take(this);
  if (memory == nullptr) return false;
  const bool advanced = reduction_->advance(library, memory);
  if (reduction_->done()) staging.release();
  return advanced;
}

bool MpiCall::advance_second(MpiLibrary& library) {
  bool advanced = false;
  for (Peer& peer : peers_) {
    advanced |= peer.second_send.advance(library);
    // The segment that comes back lies where the one sent to this peer still may be read.
    if (peer.first_send.done()) advanced |= peer.second_receive.advance(library);
  }
  return advanced;
}

bool MpiCall::finished(const Peer& peer) const {
  return peer.header_sent && peer.header_received && peer.first_send.done() && peer.first_receive.done() &&
         peer.second_send.done() && peer.second_receive.done();
}

bool MpiCall::complete() const {
  return (!reduction_ || reduction_->done()) &&
         std::all_of(peers_.begin(), peers_.end(), [this](const Peer& peer) { return finished(peer); });
}

void MpiCall::check_header(const Peer& peer) const {
  HeaderOf own = {group_.world_rank(group_.rank), peer.mine};
  HeaderOf other = {group_.world_rank(peer.member), peer.theirs};
  // The lower rank first, so that both sides say the same.
  const std::optional<std::string> found =
      own.world_rank < other.world_rank ? disagreement(own, other, group_.name) : disagreement(other, own, group_.name);
  if (found) throw CommunicationError(*found);
}

std::string MpiCall::title() const {
  return fmt::format("{} '{}' of {} bytes, call {} of {}", name_of(call_.operation), call_.label, call_.bytes,
                     sequence_, group_.name);
}

std::vector<MpiCall::Laggard> MpiCall::laggards() const {
  std::vector<Laggard> found;
  const bool waits_for_sum = reduction_ && !reduction_->done();
  for (const Peer& peer : peers_)
    if (!finished(peer) || waits_for_sum) found.push_back({group_.world_rank(peer.member), peer.header_received});
  // Where some have not come, they are what the others wait for too.
  const auto has_come = [](const Laggard& laggard) { return laggard.come; };
  if (!std::all_of(found.begin(), found.end(), has_come))
    found.erase(std::remove_if(found.begin(), found.end(), has_come), found.end());
  std::sort(found.begin(), found.end(), [](const Laggard& a, const Laggard& b) { return a.world_rank < b.world_rank; });
  return found;
}

}  // namespace farspan
