// SPDX-License-Identifier: Apache-2.0
// cp_comm_type all_gather. Every rank holds all keys and values while it attends, and in backward all their fp32
// gradients, which one reduce-scatter then sums in rank order. A rank's own blocks need nobody and are computed while
// the gather is under way. Memory grows with cp, in return for one wait instead of cp - 1.
#include "parallel/context/block_attention.h"

namespace farspan {
namespace {

// All ranks' packed keys and values, (cp, 2, B, s, K, D).
Shape whole_shape(const AttentionCall& call) {
  return {call.cp.size(), 2, call.rows(), call.layout.local_length(), call.shape.kv_heads, call.shape.head_dim};
}

// A rank's part of a whole, (2, B, s, K, D).
Tensor part_of(const AttentionCall& call, const Tensor& whole, int rank) {
  return whole.slice(0, rank, rank + 1).reshape(call.packed_shape(call.layout.local_length()));
}

// Gathers keys and values into `whole`; `attend_own` runs meanwhile.
template <typename AttendOwn>
void gather(const AttentionCall& call, Tensor whole, std::string_view label, AttendOwn&& attend_own) {
  const Buffer own = call.arena.take("attention.own_key_value", call.dtype(),
                                     call.packed_shape(call.layout.local_length()), Purpose::communication);
  pack(call.device, call.key, call.value, own);
  Work arrival = call.cp.all_gather(own, whole, label);
  attend_own();
  arrival.wait();
}

// The other ranks in the order in which their keys would come by in the ring.
template <typename Body>
void for_each_other_rank(const Communicator& cp, Body&& body) {
  for (int hop = 1; hop < cp.size(); ++hop) body((cp.rank() - hop + cp.size()) % cp.size());
}

}  // namespace

void all_gather_forward(const AttentionCall& call, Tensor out, Tensor lse) {
  const Span all{0, call.layout.local_length()};
  const Buffer whole =
      call.arena.take("attention.all_key_value", call.dtype(), whole_shape(call), Purpose::communication);
  gather(call, whole, "attention forward key/value",
         [&] { attend_forward(call, call.cp.rank(), all, call.key, call.value, out, lse); });
  for_each_other_rank(call.cp, [&](int rank) {
    const Tensor part = part_of(call, whole, rank);
    attend_forward(call, rank, all, packed_half(part, 0), packed_half(part, 1), out, lse);
  });
}

void all_gather_backward(const AttentionCall& call, const OutputGradient& gradient, Tensor d_key, Tensor d_value) {
  const Span all{0, call.layout.local_length()};
  const Buffer d_whole =
      call.arena.take("attention.all_d_key_value", DType::f32, whole_shape(call), Purpose::communication);
  zero_packed(call.device, d_whole);
  auto attend = [&](int rank, const Tensor& key, const Tensor& value) {
    const Tensor d_part = part_of(call, d_whole, rank);
    attend_backward(call, gradient, rank, all, key, value, packed_half(d_part, 0), packed_half(d_part, 1));
  };
  {
    const Buffer whole =
        call.arena.take("attention.all_key_value", call.dtype(), whole_shape(call), Purpose::communication);
    gather(call, whole, "attention backward key/value", [&] { attend(call.cp.rank(), call.key, call.value); });
    for_each_other_rank(call.cp, [&](int rank) {
      const Tensor part = part_of(call, whole, rank);
      attend(rank, packed_half(part, 0), packed_half(part, 1));
    });
  }
  const Buffer d_own = call.arena.take("attention.own_d_key_value", DType::f32,
                                       call.packed_shape(call.layout.local_length()), Purpose::communication);
  call.cp.reduce_scatter(d_whole, d_own, "attention backward d_key/d_value").wait();
  unpack(call.device, d_own, d_key, d_value);
}

}  // namespace farspan
