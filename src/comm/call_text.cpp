// SPDX-License-Identifier: Apache-2.0
#include "comm/call_text.h"

namespace farspan {
namespace {

std::string message_text(const MessageSide& side) {
  if (side.bytes == kNoMessage) return "nothing";
  return fmt::format("{} bytes of {}", side.bytes, name_of(side.dtype));
}

}  // namespace

std::string call_text(int world_rank, Operation operation, int64_t bytes, DType dtype, std::string_view label) {
  if (operation == Operation::barrier || operation == Operation::exchange)
    return fmt::format("rank {} called {} '{}'", world_rank, name_of(operation), label);
  return fmt::format("rank {} called {} of {} bytes of {} '{}'", world_rank, name_of(operation), bytes, name_of(dtype),
                     label);
}

std::string message_mismatch_text(int64_t number, const MessageSide& sender, const MessageSide& receiver) {
  return fmt::format("message {} from rank {} to rank {}: rank {} sends {} ('{}'), rank {} receives {} ('{}')", number,
                     sender.rank, receiver.rank, sender.rank, message_text(sender), sender.label, receiver.rank,
                     message_text(receiver), receiver.label);
}

std::string disagreement_text(int64_t sequence, std::string_view group, std::string_view found) {
  return fmt::format("call {} of {}: {}; all ranks of a group must make the same calls in the same order", sequence,
                     group, found);
}

}  // namespace farspan
