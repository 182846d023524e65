// SPDX-License-Identifier: Apache-2.0
// Posting: one rank's part of one collective among threads: the memory it offers to the others and where its own result
// goes. The functions below do a rank's share of the work by reading its peers' postings; who may read when is decided
// by the Rendezvous, and how it is read by the rank's Mover.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/call_communicator.h"

namespace farspan {

class Mover;

// How far a rank has come in a call. Each step reads memory that the peers' stage has made ready.
enum class Stage {
  absent,    // not called yet
  posted,    // its memory may be read
  reduced,   // all_reduce: its own segment holds the sum
  received,  // it has all it needs and reads no more
  complete,  // nobody reads its memory any more
};

// What a rank's mover keeps with its posting, for the movers of its peers too: when each stage is reached on a GPU.
class Trail {
 public:
  virtual ~Trail() = default;
};

struct Posting : CallArguments {
  Stage stage = Stage::absent;
  bool withdrawn = false;  // its memory may no longer be read
  int64_t ticket = 0;      // in the rank's recorder
  std::unique_ptr<Trail> trail;
};

// visit(peer, stage): a peer and the stage it must have reached before `rank`, which has come to `reached`, can go on.
template <typename Visit>
void for_each_need(std::span<const Posting> postings, int rank, Stage reached, Visit visit) {
  const Posting& own = postings[static_cast<size_t>(rank)];
  const bool receiving = reached == Stage::posted;
  if (own.operation == Operation::exchange) {
    for (const Message& message : receiving ? own.receives : own.sends)
      if (message.peer != rank) visit(message.peer, receiving ? Stage::posted : Stage::received);
    return;
  }
  // Nobody reads a barrier's memory: it is complete when all have come.
  if (own.operation == Operation::barrier && !receiving) return;
  for (int peer = 0; peer < static_cast<int>(postings.size()); ++peer)
    if (peer != rank) visit(peer, reached);
}

// Why two ranks' postings of the same call do not fit, in one clause that names both by their world ranks; nothing when
// they do.
std::optional<std::string> mismatch(std::span<const Posting> postings, int a, int b, std::span<const int> world_ranks);

// The next step of `rank`, returning the stage it reaches. There is no scratch memory, and every run gives the same
// bits.
Stage take_step(std::span<Posting> postings, int rank, Mover& mover);

// The rank's call is complete: its memory is its own again.
void resume(std::span<const Posting> postings, int rank, Mover& mover);

}  // namespace farspan
