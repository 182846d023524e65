// SPDX-License-Identifier: Apache-2.0
#include "comm/threads/posting.h"

#include <algorithm>

#include "comm/call_text.h"
#include "comm/threads/mover.h"

namespace farspan {
namespace {

const Posting& at(std::span<const Posting> postings, int rank) { return postings[static_cast<size_t>(rank)]; }

void copy_bytes(Mover& mover, std::byte* target, const std::byte* source, int64_t bytes) {
  if (bytes > 0 && target != source) mover.copy(target, source, bytes);
}

std::vector<const std::byte*> sources_of(std::span<const Posting> postings) {
  std::vector<const std::byte*> sources;
  for (const Posting& posting : postings) sources.push_back(posting.source);
  return sources;
}

void reduce_own_segment(std::span<const Posting> postings, int rank, Mover& mover) {
  const Posting& own = at(postings, rank);
  const int64_t element = size_of(own.dtype);
  const Segment segment = segment_of(own.bytes / element, rank, static_cast<int>(postings.size()));
  mover.sum(own.dtype, sources_of(postings), segment.begin, segment.count, own.target + segment.begin * element);
}

void collect_segments(std::span<const Posting> postings, int rank, Mover& mover) {
  const Posting& own = at(postings, rank);
  const int size = static_cast<int>(postings.size());
  const int64_t element = size_of(own.dtype);
  for (int step = 1; step < size; ++step) {
    const int q = (rank + step) % size;
    const Segment segment = segment_of(own.bytes / element, q, size);
    const int64_t begin = segment.begin * element;
    copy_bytes(mover, own.target + begin, at(postings, q).source + begin, segment.count * element);
  }
}

void reduce_own_piece(std::span<const Posting> postings, int rank, Mover& mover) {
  const Posting& own = at(postings, rank);
  const int64_t count = own.bytes / size_of(own.dtype) / static_cast<int64_t>(postings.size());
  mover.sum(own.dtype, sources_of(postings), rank * count, count, own.target);
}

// Every rank's loop starts at itself, so that the ranks do not all read the same peer at once.
void gather_parts(std::span<const Posting> postings, int rank, Mover& mover) {
  const Posting& own = at(postings, rank);
  const int size = static_cast<int>(postings.size());
  for (int step = 0; step < size; ++step) {
    const int q = (rank + step) % size;
    copy_bytes(mover, own.target + q * own.bytes, at(postings, q).source, own.bytes);
  }
}

void collect_pieces(std::span<const Posting> postings, int rank, Mover& mover) {
  const Posting& own = at(postings, rank);
  const int size = static_cast<int>(postings.size());
  const int64_t piece = own.bytes / size;
  for (int step = 0; step < size; ++step) {
    const int q = (rank + step) % size;
    copy_bytes(mover, own.target + q * piece, at(postings, q).source + rank * piece, piece);
  }
}

// The first message at or after `from` whose peer is `peer`; messages.size() when there is none.
size_t next_with_peer(std::span<const Message> messages, size_t from, int peer) {
  while (from < messages.size() && messages[from].peer != peer) ++from;
  return from;
}

void receive_messages(std::span<const Posting> postings, int rank, Mover& mover) {
  const std::vector<Message>& receives = at(postings, rank).receives;
  for (size_t i = 0; i < receives.size(); ++i) {
    const std::vector<Message>& sends = at(postings, receives[i].peer).sends;
    size_t match = next_with_peer(sends, 0, rank);
    for (size_t earlier = 0; earlier < i; ++earlier)
      if (receives[earlier].peer == receives[i].peer) match = next_with_peer(sends, match + 1, rank);
    copy_bytes(mover, static_cast<std::byte*>(receives[i].data.raw()),
               static_cast<const std::byte*>(sends[match].data.raw()), receives[i].data.bytes());
  }
}

std::string describe(const Posting& posting, int world_rank) {
  return call_text(world_rank, posting.operation, posting.bytes, posting.dtype, posting.label);
}

const Tensor* message_or_nothing(std::span<const Message> messages, size_t i) {
  return i == messages.size() ? nullptr : &messages[i].data;
}

// The sends of `from` to `to` against the receives of `to` from `from`.
std::optional<std::string> message_mismatch(std::span<const Posting> postings, int from, int to,
                                            std::span<const int> world_ranks) {
  const std::vector<Message>& sends = at(postings, from).sends;
  const std::vector<Message>& receives = at(postings, to).receives;
  size_t s = next_with_peer(sends, 0, to);
  size_t r = next_with_peer(receives, 0, from);
  for (int number = 0; s < sends.size() || r < receives.size(); ++number) {
    if (s == sends.size() || r == receives.size() || sends[s].data.bytes() != receives[r].data.bytes() ||
        sends[s].data.dtype() != receives[r].data.dtype()) {
      const int sender = world_ranks[static_cast<size_t>(from)];
      const int receiver = world_ranks[static_cast<size_t>(to)];
      const Tensor* sent = message_or_nothing(sends, s);
      const Tensor* received = message_or_nothing(receives, r);
      return message_mismatch_text(number,
                                   {.rank = sender,
                                    .label = at(postings, from).label,
                                    .bytes = sent ? sent->bytes() : kNoMessage,
                                    .dtype = sent ? sent->dtype() : DType::u8},
                                   {.rank = receiver,
                                    .label = at(postings, to).label,
                                    .bytes = received ? received->bytes() : kNoMessage,
                                    .dtype = received ? received->dtype() : DType::u8});
    }
    s = next_with_peer(sends, s + 1, to);
    r = next_with_peer(receives, r + 1, from);
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> mismatch(std::span<const Posting> postings, int a, int b, std::span<const int> world_ranks) {
  const Posting& x = at(postings, a);
  const Posting& y = at(postings, b);
  const bool exchange = x.operation == Operation::exchange;
  if (x.operation != y.operation || (!exchange && (x.bytes != y.bytes || x.dtype != y.dtype)))
    return describe(x, world_ranks[static_cast<size_t>(a)]) + ", " + describe(y, world_ranks[static_cast<size_t>(b)]);
  if (!exchange) return std::nullopt;
  std::optional<std::string> found = message_mismatch(postings, a, b, world_ranks);
  return found ? found : message_mismatch(postings, b, a, world_ranks);
}

namespace {

// What `rank` moves in its next step; the stage it then reaches.
Stage move_data(std::span<const Posting> postings, int rank, Mover& mover) {
  const Posting& own = at(postings, rank);
  if (own.stage == Stage::reduced) {
    collect_segments(postings, rank, mover);
    return Stage::received;
  }
  switch (own.operation) {
    case Operation::all_reduce:
      reduce_own_segment(postings, rank, mover);
      return Stage::reduced;
    case Operation::all_gather:
      gather_parts(postings, rank, mover);
      break;
    case Operation::reduce_scatter:
      reduce_own_piece(postings, rank, mover);
      break;
    case Operation::all_to_all:
      collect_pieces(postings, rank, mover);
      break;
    case Operation::exchange:
      receive_messages(postings, rank, mover);
      break;
    case Operation::barrier:
      break;
  }
  return Stage::received;
}

}  // namespace

Stage take_step(std::span<Posting> postings, int rank, Mover& mover) {
  Posting& own = postings[static_cast<size_t>(rank)];
  if (own.announced || own.stage == Stage::received) return Stage::complete;
  mover.follow(own, own.stage);
  for_each_need(postings, rank, own.stage, [&](int peer, Stage stage) { mover.follow(at(postings, peer), stage); });
  const Stage reached = move_data(postings, rank, mover);
  mover.reach(own, reached);
  return reached;
}

void resume(std::span<const Posting> postings, int rank, Mover& mover) {
  const Posting& own = at(postings, rank);
  if (own.announced || own.operation == Operation::barrier) return;
  std::vector<const Posting*> readers = {&own};
  for_each_need(postings, rank, Stage::received, [&](int peer, Stage) {
    const Posting* reader = &at(postings, peer);
    if (std::find(readers.begin(), readers.end(), reader) == readers.end()) readers.push_back(reader);
  });
  mover.resume(readers);
}

}  // namespace farspan
