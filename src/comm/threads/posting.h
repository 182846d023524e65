// SPDX-License-Identifier: Apache-2.0
// Posting: one rank's part of one collective among threads: the memory it offers to the others and where its own result
// goes. The functions below do a rank's share of the work by reading its peers' postings; who may read when is decided
// by the Rendezvous.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/call_communicator.h"

namespace farspan {

// How far a rank has come in a call. Each step reads memory that the peers' stage has made ready.
enum class Stage {
  absent,    // not called yet
  posted,    // its memory may be read
  reduced,   // all_reduce: its own segment holds the sum
  received,  // it has all it needs and reads no more
  complete,  // nobody reads its memory any more
};

struct Posting : CallArguments {
  Stage stage = Stage::absent;
  bool withdrawn = false;  // its memory may no longer be read
  int64_t ticket = 0;      // in the rank's recorder
};

// Why two ranks' postings of the same call do not fit, in one clause that names both by their world ranks; nothing when
// they do.
std::optional<std::string> mismatch(std::span<const Posting> postings, int a, int b, std::span<const int> world_ranks);

// The next step of `rank`, returning the stage it reaches. There is no scratch memory, and every run gives the same
// bits.
Stage take_step(std::span<const Posting> postings, int rank);

}  // namespace farspan
