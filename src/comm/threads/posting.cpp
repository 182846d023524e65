// SPDX-License-Identifier: Apache-2.0
#include "comm/threads/posting.h"

#include <algorithm>
#include <cstring>

namespace farspan {
namespace {

// Bytes summed at a time: small enough for the stack and the first-level cache.
constexpr int64_t kBlockBytes = 4096;

const Posting& at(std::span<const Posting> postings, int rank) { return postings[static_cast<size_t>(rank)]; }

void copy_bytes(std::byte* target, const std::byte* source, int64_t bytes) {
  if (bytes > 0 && target != source) std::memcpy(target, source, static_cast<size_t>(bytes));
}

// out[i] = ((x_0[i] + x_1[i]) + x_2[i]) + ..., with x_q = source(q). `out` may be one of the sources.
template <typename T, typename Source>
void sum_in_rank_order(int size, int64_t count, Source source, T* out) {
  constexpr int64_t kBlock = kBlockBytes / static_cast<int64_t>(sizeof(T));
  T sum[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    std::copy_n(source(0) + begin, n, sum);
    for (int q = 1; q < size; ++q) {
      const T* x = source(q) + begin;
      for (int64_t i = 0; i < n; ++i) sum[i] += x[i];
    }
    std::copy_n(sum, n, out + begin);
  }
}

// Sums `count` elements that start at `offset` in every rank's source.
void sum_sources(std::span<const Posting> postings, DType dtype, int64_t offset, int64_t count, std::byte* out) {
  const auto sum = [&]<typename T>(T* typed_out) {
    const auto source = [&](int q) { return reinterpret_cast<const T*>(at(postings, q).source) + offset; };
    sum_in_rank_order<T>(static_cast<int>(postings.size()), count, source, typed_out);
  };
  if (dtype == DType::f32) {
    sum(reinterpret_cast<float*>(out));
  } else {
    sum(reinterpret_cast<double*>(out));
  }
}

void reduce_own_segment(std::span<const Posting> postings, int rank) {
  const Posting& own = at(postings, rank);
  const int64_t element = size_of(own.dtype);
  const Segment segment = segment_of(own.bytes / element, rank, static_cast<int>(postings.size()));
  sum_sources(postings, own.dtype, segment.begin, segment.count, own.target + segment.begin * element);
}

void collect_segments(std::span<const Posting> postings, int rank) {
  const Posting& own = at(postings, rank);
  const int size = static_cast<int>(postings.size());
  const int64_t element = size_of(own.dtype);
  for (int step = 1; step < size; ++step) {
    const int q = (rank + step) % size;
    const Segment segment = segment_of(own.bytes / element, q, size);
    const int64_t begin = segment.begin * element;
    copy_bytes(own.target + begin, at(postings, q).source + begin, segment.count * element);
  }
}

void reduce_own_piece(std::span<const Posting> postings, int rank) {
  const Posting& own = at(postings, rank);
  const int64_t count = own.bytes / size_of(own.dtype) / static_cast<int64_t>(postings.size());
  sum_sources(postings, own.dtype, rank * count, count, own.target);
}

// Every rank's loop starts at itself, so that the ranks do not all read the same peer at once.
void gather_parts(std::span<const Posting> postings, int rank) {
  const Posting& own = at(postings, rank);
  const int size = static_cast<int>(postings.size());
  for (int step = 0; step < size; ++step) {
    const int q = (rank + step) % size;
    copy_bytes(own.target + q * own.bytes, at(postings, q).source, own.bytes);
  }
}

void collect_pieces(std::span<const Posting> postings, int rank) {
  const Posting& own = at(postings, rank);
  const int size = static_cast<int>(postings.size());
  const int64_t piece = own.bytes / size;
  for (int step = 0; step < size; ++step) {
    const int q = (rank + step) % size;
    copy_bytes(own.target + q * piece, at(postings, q).source + rank * piece, piece);
  }
}

// The first message at or after `from` whose peer is `peer`; messages.size() when there is none.
size_t next_with_peer(std::span<const Message> messages, size_t from, int peer) {
  while (from < messages.size() && messages[from].peer != peer) ++from;
  return from;
}

void receive_messages(std::span<const Posting> postings, int rank) {
  const std::vector<Message>& receives = at(postings, rank).receives;
  for (size_t i = 0; i < receives.size(); ++i) {
    const std::vector<Message>& sends = at(postings, receives[i].peer).sends;
    size_t match = next_with_peer(sends, 0, rank);
    for (size_t earlier = 0; earlier < i; ++earlier)
      if (receives[earlier].peer == receives[i].peer) match = next_with_peer(sends, match + 1, rank);
    copy_bytes(static_cast<std::byte*>(receives[i].data.raw()), static_cast<const std::byte*>(sends[match].data.raw()),
               receives[i].data.bytes());
  }
}

std::string describe(const Posting& posting, int world_rank) {
  if (posting.operation == Operation::barrier || posting.operation == Operation::exchange)
    return fmt::format("rank {} called {} '{}'", world_rank, name_of(posting.operation), posting.label);
  return fmt::format("rank {} called {} of {} bytes of {} '{}'", world_rank, name_of(posting.operation), posting.bytes,
                     name_of(posting.dtype), posting.label);
}

std::string describe(std::span<const Message> messages, size_t i) {
  if (i == messages.size()) return "nothing";
  return fmt::format("{} bytes of {}", messages[i].data.bytes(), name_of(messages[i].data.dtype()));
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
      return fmt::format("message {} from rank {} to rank {}: rank {} sends {} ('{}'), rank {} receives {} ('{}')",
                         number, sender, receiver, sender, describe(sends, s), at(postings, from).label, receiver,
                         describe(receives, r), at(postings, to).label);
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

Stage take_step(std::span<const Posting> postings, int rank) {
  const Posting& own = at(postings, rank);
  if (own.stage == Stage::received) return Stage::complete;
  if (own.stage == Stage::reduced) {
    collect_segments(postings, rank);
    return Stage::received;
  }
  switch (own.operation) {
    case Operation::all_reduce:
      reduce_own_segment(postings, rank);
      return Stage::reduced;
    case Operation::all_gather:
      gather_parts(postings, rank);
      break;
    case Operation::reduce_scatter:
      reduce_own_piece(postings, rank);
      break;
    case Operation::all_to_all:
      collect_pieces(postings, rank);
      break;
    case Operation::exchange:
      receive_messages(postings, rank);
      break;
    case Operation::barrier:
      break;
  }
  return Stage::received;
}

}  // namespace farspan
