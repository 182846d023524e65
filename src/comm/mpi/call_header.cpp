// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/call_header.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "comm/call_text.h"

namespace farspan {
namespace {

static_assert(std::is_trivially_copyable_v<CallHeader>, "it is sent as bytes");

// FNV-1a, 64 bits.
constexpr uint64_t kDigestStart = 14695981039346656037u;
uint64_t add_to_digest(uint64_t digest, uint64_t value) {
  for (int shift = 0; shift < 64; shift += 8) digest = (digest ^ ((value >> shift) & 0xff)) * 1099511628211u;
  return digest;
}

uint64_t digest_of(std::string_view text) {
  uint64_t digest = kDigestStart;
  for (char c : text) digest = (digest ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return digest;
}

CallHeader::MessageList list_of(std::span<const Message> messages, int peer) {
  CallHeader::MessageList list;
  list.digest = kDigestStart;
  for (const Message& message : messages) {
    if (message.peer != peer) continue;
    if (list.count < CallHeader::kListed) {
      list.bytes[static_cast<size_t>(list.count)] = message.data.bytes();
      list.dtypes[static_cast<size_t>(list.count)] = message.data.dtype();
    }
    list.digest = add_to_digest(list.digest, static_cast<uint64_t>(message.data.bytes()));
    list.digest = add_to_digest(list.digest, static_cast<uint64_t>(message.data.dtype()));
    ++list.count;
  }
  return list;
}

MessageSide side_of(HeaderOf rank, const CallHeader::MessageList& list, int64_t number) {
  MessageSide side{.rank = rank.world_rank, .label = rank.header.label(), .bytes = kNoMessage, .dtype = DType::u8};
  if (number >= std::min<int64_t>(list.count, CallHeader::kListed)) return side;
  side.bytes = list.bytes[static_cast<size_t>(number)];
  side.dtype = list.dtypes[static_cast<size_t>(number)];
  return side;
}

std::optional<std::string> message_disagreement(HeaderOf sender, HeaderOf receiver) {
  const CallHeader::MessageList& sent = sender.header.sends;
  const CallHeader::MessageList& received = receiver.header.receives;
  if (sent.count == received.count && sent.digest == received.digest) return std::nullopt;
  const int64_t listed = std::min<int64_t>(std::max(sent.count, received.count), CallHeader::kListed);
  for (int64_t number = 0; number < listed; ++number) {
    const MessageSide from = side_of(sender, sent, number);
    const MessageSide to = side_of(receiver, received, number);
    if (from.bytes != to.bytes || from.dtype != to.dtype) return message_mismatch_text(number, from, to);
  }
  return fmt::format(
      "rank {} sends {} messages to rank {} ('{}'), which receives {} ('{}'); they differ after the {}th",
      sender.world_rank, sent.count, receiver.world_rank, sender.header.label(), received.count,
      receiver.header.label(), CallHeader::kListed);
}

std::string call_of(HeaderOf rank) {
  const CallHeader& header = rank.header;
  return call_text(rank.world_rank, header.operation, header.bytes, header.dtype, header.label());
}

}  // namespace

std::string_view CallHeader::label() const {
  return {label_text.data(), strnlen(label_text.data(), label_text.size())};
}

CallHeader header_for(const CallArguments& call, std::string_view group, int64_t sequence, int peer) {
  CallHeader header;
  header.group = digest_of(group);
  header.sequence = sequence;
  header.operation = call.operation;
  header.dtype = call.dtype;
  header.bytes = call.bytes;
  header.sends = list_of(call.sends, peer);
  header.receives = list_of(call.receives, peer);
  std::copy_n(call.label.data(), std::min(call.label.size(), header.label_text.size()), header.label_text.data());
  return header;
}

std::optional<std::string> disagreement(HeaderOf a, HeaderOf b, std::string_view group) {
  const CallHeader& x = a.header;
  const CallHeader& y = b.header;
  if (x.group != y.group)
    return fmt::format("{}, {}, in different groups, one of them {}; ranks must make the same groups in the same order",
                       call_of(a), call_of(b), group);
  const bool exchange = x.operation == Operation::exchange;
  if (x.operation != y.operation || (!exchange && (x.bytes != y.bytes || x.dtype != y.dtype)))
    return disagreement_text(x.sequence, group, call_of(a) + ", " + call_of(b));
  if (x.sequence != y.sequence)
    return disagreement_text(x.sequence, group,
                             fmt::format("{}, {} as its call {}", call_of(a), call_of(b), y.sequence));
  if (!exchange) return std::nullopt;
  std::optional<std::string> found = message_disagreement(a, b);
  if (!found) found = message_disagreement(b, a);
  return found ? disagreement_text(x.sequence, group, *found) : found;
}

}  // namespace farspan
