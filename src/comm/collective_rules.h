// SPDX-License-Identifier: Apache-2.0
// What one call of a collective must satisfy and how many bytes it moves: one set of rules for every backend, so that a
// plan made with the dry communicator counts what a run counts.
//
// The check_ functions throw InternalError when the tensors of the call do not fit each other or the group: that is a
// mistake of the calling code on this rank alone. Whether the ranks agree with each other is the backend's to find out.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "comm/communicator.h"

namespace farspan {

enum class Operation { all_reduce, all_gather, reduce_scatter, all_to_all, exchange, barrier };
std::string_view name_of(Operation operation);

// Elements [begin, begin + count) of a whole cut in `size` nearly equal segments, the first ones longer by one.
struct Segment {
  int64_t begin = 0;
  int64_t count = 0;
};
Segment segment_of(int64_t whole, int rank, int size);

struct CallBytes {
  int64_t payload = 0;   // what ranks must agree on; named in messages
  int64_t sent = 0;      // read from this rank's memory by others
  int64_t received = 0;  // read from others' memory by this rank
};

// Segment r (n_r elements) is summed by rank r, which reads it from size - 1 peers, and then read by them:
// received = sent = (n_r * (size - 1) + n - n_r) * element bytes, which is 2 n (size - 1) / size where size divides n.
CallBytes check_all_reduce(const Tensor& data, int rank, int size, std::string_view label);
// payload: the part. sent = received = part * (size - 1).
CallBytes check_all_gather(const Tensor& part, const Tensor& whole, int size, std::string_view label);
// payload: the whole. sent = received = whole * (size - 1) / size.
CallBytes check_reduce_scatter(const Tensor& whole, const Tensor& part, int size, std::string_view label);
// payload: all of `send`. sent = received = send * (size - 1) / size.
CallBytes check_all_to_all(const Tensor& send, const Tensor& receive, int size, std::string_view label);
// payload: all sends. A message to oneself is a local copy and not counted.
CallBytes check_exchange(std::span<const Message> sends, std::span<const Message> receives, int rank, int size,
                         std::string_view label);

// Others read the source while this rank writes the target: they may share memory only where nobody else reads, which
// is the rank's own piece, `in_place` bytes into the larger of the two; kNowhere: not at all.
inline constexpr int64_t kNowhere = -1;
void check_overlap(const Tensor& source, const Tensor& target, int64_t in_place, Operation operation,
                   std::string_view label);
// The same for all that an exchange sends, some of it perhaps to several peers, and receives: nowhere.
void check_apart(std::span<const Message> sends, std::span<const Message> receives, std::string_view label);

void count(const CallBytes& bytes, Traffic& traffic);

}  // namespace farspan
