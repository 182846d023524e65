// SPDX-License-Identifier: Apache-2.0
// CallHeader: what two ranks tell each other about a call before its data is received, so that a wrong operation, size
// or order is said by both sides instead of being received into the wrong memory. Sent as it lies in memory: all
// processes run this program on machines of one kind.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "comm/call_communicator.h"

namespace farspan {

struct CallHeader {
  // Messages with one peer that are described one by one; further ones are held to a sum over all.
  static constexpr int kListed = 16;
  struct MessageList {
    int64_t count = 0;
    uint64_t digest = 0;
    std::array<int64_t, kListed> bytes{};
    std::array<DType, kListed> dtypes{};
  };

  uint64_t group = 0;  // digest of the group's name
  int64_t sequence = 0;
  Operation operation = Operation::barrier;
  DType dtype = DType::u8;
  int64_t bytes = 0;
  MessageList sends;     // to the reader of this header
  MessageList receives;  // from it
  std::array<char, 96> label_text{};

  std::string_view label() const;
};

// `peer` is a rank within the group.
CallHeader header_for(const CallArguments& call, std::string_view group, int64_t sequence, int peer);

struct HeaderOf {
  int world_rank = 0;
  const CallHeader& header;
};

// Why the two do not fit, as disagreement_text() has it; nothing when they do. `group` is the first one's.
std::optional<std::string> disagreement(HeaderOf a, HeaderOf b, std::string_view group);

}  // namespace farspan
