// SPDX-License-Identifier: Apache-2.0
// MpiCall: one rank's part of one collective among processes. Each member first sends the others a CallHeader; what a
// peer sends is received only after its header fits.
//
//   header to every peer, own data to it at once
//   header from a peer fits          -> its data is received, straight into place
//   sums: all headers fit            -> the peers' stretches are received through staging memory and summed
//   all_reduce: own segment summed   -> it goes to all peers, theirs come into place
//
// An announced call ends with the headers.
//
// Data is sent from and received into the caller's memory; only sums are staged. Staging is taken when all peers are
// known to have made the call, so that whoever holds it can go on: the others' sends need nothing from this rank.
//
// Tags. Each pair of processes numbers the groups that both are in, and gives each group a range of tags: one for
// headers, which therefore meet in the order of the calls, and two for the data of each call that may be open.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/mpi/call_header.h"
#include "comm/mpi/flow.h"
#include "comm/mpi/reduction.h"

namespace farspan {

// What a communicator and its calls know of their group.
struct MpiGroup {
  std::string name;  // "cp group [0, 2]"
  std::vector<int> ranks;
  int rank = 0;                 // within the group
  std::vector<int> first_tags;  // of the range shared with each member; unused for oneself
  int64_t calls = 0;            // made so far

  static constexpr int kOpenCalls = 128;
  static constexpr int kTags = 1 + 2 * kOpenCalls;
  int size() const { return static_cast<int>(ranks.size()); }
  int world_rank(int member) const { return ranks[static_cast<size_t>(member)]; }
  int header_tag(int member) const { return first_tags[static_cast<size_t>(member)]; }
  int data_tag(int member, int64_t sequence, int phase) const {
    return header_tag(member) + 1 + 2 * static_cast<int>(sequence % kOpenCalls) + phase;
  }
};

class MpiCall {
 public:
  // Sends the headers and what can go with them. `group` must outlive the call. Throws CommunicationError when messages
  // to oneself do not fit.
  MpiCall(MpiLibrary& library, const MpiGroup& group, CallArguments call, int64_t sequence);

  // Takes every step that is ready; true when there was one. Throws CommunicationError when a peer's call differs.
  bool advance(MpiLibrary& library, Staging& staging);
  bool complete() const;

  // "all_reduce 'gradient' of 40 bytes, call 3 of cp group [0, 1]"
  std::string title() const;
  const MpiGroup& group() const { return group_; }

  // Who keeps this call from completing.
  struct Laggard {
    int world_rank = 0;
    bool come = false;  // it has made the call
  };
  std::vector<Laggard> laggards() const;

  int64_t ticket = 0;  // in the rank's recorder

 private:
  // One other member and what goes between it and this rank. Kept where it is: transfers point into it.
  struct Peer {
    Peer(const MpiGroup& group, int member, int64_t sequence, int64_t first_piece_bytes);
    int member;
    CallHeader mine;
    CallHeader theirs;
    MpiLibrary::Request send_header;
    MpiLibrary::Request receive_header;
    bool header_sent = false;
    bool header_received = false;
    Flow first_send;
    Flow first_receive;
    Flow second_send;  // all_reduce: summed segments
    Flow second_receive;
  };

  bool reduces() const;
  void make_peers(int64_t sequence);
  void add_flows(Peer& peer);
  void copy_own_part() const;
  void check_messages_to_oneself() const;
  void copy_messages_to_oneself() const;
  void make_reduction(int64_t sequence);
  bool advance_peer(MpiLibrary& library, Peer& peer);
  bool advance_reduction(MpiLibrary& library, Staging& staging);
  bool advance_second(MpiLibrary& library);
  bool finished(const Peer& peer) const;
  void check_header(const Peer& peer) const;

  const MpiGroup& group_;
  CallArguments call_;
  int64_t sequence_;
  std::deque<Peer> peers_;
  std::optional<RankOrderReduction> reduction_;
};

}  // namespace farspan
