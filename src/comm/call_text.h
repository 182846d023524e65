// SPDX-License-Identifier: Apache-2.0
// How ranks that disagree are described, the same for every backend.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "comm/collective_rules.h"

namespace farspan {

// "rank 0 called all_gather of 1024 bytes of f32 'key/value'"; without sizes for a barrier or an exchange.
std::string call_text(int world_rank, Operation operation, int64_t bytes, DType dtype, std::string_view label);

inline constexpr int64_t kNoMessage = -1;

// One side of a message of an exchange.
struct MessageSide {
  int rank = 0;  // in the world
  std::string_view label;
  int64_t bytes = kNoMessage;
  DType dtype = DType::u8;
};

// "message 0 from rank 0 to rank 1: rank 0 sends 24 bytes of f32 ('hop'), rank 1 receives nothing ('last hop')"
std::string message_mismatch_text(int64_t number, const MessageSide& sender, const MessageSide& receiver);

// "call 3 of cp group [0, 1]: FOUND; all ranks of a group must make the same calls in the same order"
std::string disagreement_text(int64_t sequence, std::string_view group, std::string_view found);

}  // namespace farspan
