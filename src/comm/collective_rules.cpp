// SPDX-License-Identifier: Apache-2.0
#include "comm/collective_rules.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "base/math.h"

namespace farspan {
namespace {

void check_tensor(const Tensor& tensor, std::string_view what, Operation operation, std::string_view label) {
  FARSPAN_CHECK(tensor.defined() || tensor.numel() == 0, "{} '{}': {} is an undefined tensor", name_of(operation),
                label, what);
  FARSPAN_CHECK(tensor.contiguous(), "{} '{}': {} of shape {} is not contiguous", name_of(operation), label, what,
                tensor.shape().str());
}

void check_summable(DType dtype, Operation operation, std::string_view label) {
  FARSPAN_CHECK(dtype == DType::f32 || dtype == DType::f64, "{} '{}': sums are made in f32 or f64, not {}",
                name_of(operation), label, name_of(dtype));
}

// `whole` must be `size` parts like `part`.
void check_parts(const Tensor& part, std::string_view part_name, const Tensor& whole, std::string_view whole_name,
                 int size, Operation operation, std::string_view label) {
  check_tensor(part, part_name, operation, label);
  check_tensor(whole, whole_name, operation, label);
  FARSPAN_CHECK(part.dtype() == whole.dtype(), "{} '{}': {} is {}, {} is {}", name_of(operation), label, part_name,
                name_of(part.dtype()), whole_name, name_of(whole.dtype()));
  FARSPAN_CHECK(checked_mul(part.numel(), size) == whole.numel(),
                "{} '{}': {} has {} elements, {} has {}; {} ranks need {}", name_of(operation), label, part_name,
                part.numel(), whole_name, whole.numel(), size, part.numel() * size);
}

int64_t check_messages(std::span<const Message> messages, std::string_view what, int rank, int size,
                       std::string_view label) {
  int64_t bytes = 0;
  for (const Message& message : messages) {
    check_tensor(message.data, what, Operation::exchange, label);
    FARSPAN_CHECK(message.peer >= 0 && message.peer < size, "exchange '{}': {} with peer {} in a group of {}", label,
                  what, message.peer, size);
    if (message.peer != rank) bytes += message.data.bytes();
  }
  return bytes;
}

}  // namespace

std::string_view name_of(Operation operation) {
  switch (operation) {
    case Operation::all_reduce:
      return "all_reduce";
    case Operation::all_gather:
      return "all_gather";
    case Operation::reduce_scatter:
      return "reduce_scatter";
    case Operation::all_to_all:
      return "all_to_all";
    case Operation::exchange:
      return "exchange";
    case Operation::barrier:
      return "barrier";
  }
  throw InternalError(fmt::format("no operation has the number {}", static_cast<int>(operation)));
}

Segment segment_of(int64_t whole, int rank, int size) {
  const int64_t shortest = whole / size;
  const int64_t longer = whole % size;
  return {rank * shortest + std::min<int64_t>(rank, longer), shortest + (rank < longer ? 1 : 0)};
}

CallBytes check_all_reduce(const Tensor& data, int rank, int size, std::string_view label) {
  check_tensor(data, "the tensor", Operation::all_reduce, label);
  check_summable(data.dtype(), Operation::all_reduce, label);
  const int64_t own = segment_of(data.numel(), rank, size).count;
  const int64_t moved = (own * (size - 1) + data.numel() - own) * size_of(data.dtype());
  return {data.bytes(), moved, moved};
}

CallBytes check_all_gather(const Tensor& part, const Tensor& whole, int size, std::string_view label) {
  check_parts(part, "the part", whole, "the whole", size, Operation::all_gather, label);
  const int64_t moved = part.bytes() * (size - 1);
  return {part.bytes(), moved, moved};
}

CallBytes check_reduce_scatter(const Tensor& whole, const Tensor& part, int size, std::string_view label) {
  check_parts(part, "the part", whole, "the whole", size, Operation::reduce_scatter, label);
  check_summable(whole.dtype(), Operation::reduce_scatter, label);
  const int64_t moved = part.bytes() * (size - 1);
  return {whole.bytes(), moved, moved};
}

CallBytes check_all_to_all(const Tensor& send, const Tensor& receive, int size, std::string_view label) {
  check_tensor(send, "send", Operation::all_to_all, label);
  check_tensor(receive, "receive", Operation::all_to_all, label);
  FARSPAN_CHECK(send.dtype() == receive.dtype() && send.numel() == receive.numel(),
                "all_to_all '{}': send is {} of {}, receive is {} of {}", label, send.shape().str(),
                name_of(send.dtype()), receive.shape().str(), name_of(receive.dtype()));
  FARSPAN_CHECK(send.numel() % size == 0, "all_to_all '{}': {} elements do not cut into {} equal pieces", label,
                send.numel(), size);
  const int64_t moved = send.bytes() / size * (size - 1);
  return {send.bytes(), moved, moved};
}

CallBytes check_exchange(std::span<const Message> sends, std::span<const Message> receives, int rank, int size,
                         std::string_view label) {
  CallBytes bytes;
  bytes.sent = check_messages(sends, "a send", rank, size, label);
  bytes.received = check_messages(receives, "a receive", rank, size, label);
  for (const Message& message : sends) bytes.payload += message.data.bytes();
  return bytes;
}

void check_overlap(const Tensor& source, const Tensor& target, int64_t in_place, Operation operation,
                   std::string_view label) {
  const auto source_begin = reinterpret_cast<uintptr_t>(source.raw());
  const auto target_begin = reinterpret_cast<uintptr_t>(target.raw());
  const bool apart = source_begin + static_cast<uintptr_t>(source.bytes()) <= target_begin ||
                     target_begin + static_cast<uintptr_t>(target.bytes()) <= source_begin;
  if (apart || source.bytes() == 0) return;
  const uintptr_t larger = source.bytes() > target.bytes() ? source_begin : target_begin;
  const uintptr_t smaller = source.bytes() > target.bytes() ? target_begin : source_begin;
  FARSPAN_CHECK(in_place >= 0 && smaller == larger + static_cast<uintptr_t>(in_place),
                "{} '{}': input of {} bytes and output of {} bytes overlap", name_of(operation), label, source.bytes(),
                target.bytes());
}

void check_apart(std::span<const Message> sends, std::span<const Message> receives, std::string_view label) {
  struct Sent {
    uintptr_t begin;
    const Tensor* furthest;  // of those that begin no later, the one that ends last: some may go to several peers
  };
  const auto begin = [](const Tensor& x) { return reinterpret_cast<uintptr_t>(x.raw()); };
  const auto end = [&](const Tensor& x) { return begin(x) + static_cast<uintptr_t>(x.bytes()); };
  std::vector<Sent> sent;
  for (const Message& send : sends)
    if (send.data.bytes() > 0) sent.push_back({begin(send.data), &send.data});
  std::sort(sent.begin(), sent.end(), [](const Sent& a, const Sent& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < sent.size(); ++i)
    if (end(*sent[i].furthest) < end(*sent[i - 1].furthest)) sent[i].furthest = sent[i - 1].furthest;
  for (const Message& receive : receives) {
    if (receive.data.bytes() == 0) continue;
    const auto behind =
        std::partition_point(sent.begin(), sent.end(), [&](const Sent& s) { return s.begin < end(receive.data); });
    if (behind != sent.begin())
      check_overlap(*std::prev(behind)->furthest, receive.data, kNowhere, Operation::exchange, label);
  }
}

void count(const CallBytes& bytes, Traffic& traffic) {
  traffic.bytes_sent += bytes.sent;
  traffic.bytes_received += bytes.received;
  traffic.calls += 1;
}

}  // namespace farspan
