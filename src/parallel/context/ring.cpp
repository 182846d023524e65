// SPDX-License-Identifier: Apache-2.0
// cp_comm_type p2p. Rank r sends to r + 1 and receives from r - 1, so at hop h it holds the keys and values of rank
// r - h. The exchange for the next hop is under way while the blocks of this one are computed; two buffers take turns.
//
// Backward sends keys and values round the same ring. The gradient of rank o's keys is started by its first visitor
// (o + 1, at hop 1), goes from visitor to visitor one hop behind the keys, and after hop cp - 1 arrives at o, which
// adds its own share last. That order of summation is the ring's, never that of arrival. A rank must have the sum so
// far before it adds to it; so that this wait, too, hides behind work, the gradient travels in two pieces: while one is
// under way the blocks of the other are computed.
#include <array>

#include "parallel/context/block_attention.h"

namespace farspan {
namespace {

int rank_at_hop(const Communicator& cp, int hop) { return (cp.rank() - hop + cp.size()) % cp.size(); }

// Starts sending `out_going` to the next rank and filling `in_coming` from the previous one.
Work pass_on(Communicator& cp, const Tensor& out_going, const Tensor& in_coming, std::string_view what, int hop) {
  const Message send{(cp.rank() + 1) % cp.size(), out_going};
  const Message receive{rank_at_hop(cp, 1), in_coming};
  return cp.exchange({&send, 1}, {&receive, 1}, fmt::format("attention {} hop {}", what, hop));
}

// Two buffers of one size that take turns from hop to hop.
class BufferPair {
 public:
  BufferPair(const AttentionCall& call, std::string_view name, DType dtype) {
    for (Buffer& buffer : buffers_)
      buffer = call.arena.take(name, dtype, call.packed_shape(call.layout.local_length()), Purpose::communication);
  }
  const Tensor& at(int hop) const { return buffers_[static_cast<size_t>(hop % 2)].tensor(); }

 private:
  std::array<Buffer, 2> buffers_;
};

// A piece of a rank's tokens whose gradient travels as one message, (2, B, tokens, K, D).
struct Piece {
  Span local;
  Tensor of(const AttentionCall& call, const Tensor& buffer) const {
    const int64_t elements_per_token = buffer.numel() / call.layout.local_length();
    const Tensor flat = buffer.reshape({buffer.numel()});
    return flat.slice(0, local.begin * elements_per_token, local.end * elements_per_token)
        .reshape(call.packed_shape(local.length()));
  }
};

// The two chunks of a zigzag, or the two halves of one chunk; a lone token is one piece.
std::vector<Piece> pieces_of(const SequenceLayout& layout) {
  const int64_t tokens = layout.local_length();
  if (tokens == 1) return {Piece{{0, 1}}};
  const int64_t cut = layout.chunks_per_rank() == 2 ? layout.chunk_length() : tokens / 2;
  return {Piece{{0, cut}}, Piece{{cut, tokens}}};
}

void add_gradients(const AttentionCall& call, const OutputGradient& gradient, int key_rank, Span local,
                   const Tensor& key, const Tensor& value, const Tensor& d_key_value) {
  attend_backward(call, gradient, key_rank, local, key.slice(1, local.begin, local.end),
                  value.slice(1, local.begin, local.end), packed_half(d_key_value, 0), packed_half(d_key_value, 1));
}

}  // namespace

void ring_forward(const AttentionCall& call, Tensor out, Tensor lse) {
  const int cp = call.cp.size();
  const Span all{0, call.layout.local_length()};
  const BufferPair key_value(call, "attention.ring_key_value", call.dtype());
  pack(call.device, call.key, call.value, key_value.at(0));

  for (int hop = 0; hop < cp; ++hop) {
    const Tensor& held = key_value.at(hop);
    Work arrival;
    if (hop + 1 < cp) arrival = pass_on(call.cp, held, key_value.at(hop + 1), "forward key/value", hop + 1);
    attend_forward(call, rank_at_hop(call.cp, hop), all, packed_half(held, 0), packed_half(held, 1), out, lse);
    arrival.wait();
  }
}

void ring_backward(const AttentionCall& call, const OutputGradient& gradient, Tensor d_key, Tensor d_value) {
  const int cp = call.cp.size();
  const BufferPair key_value(call, "attention.ring_key_value", call.dtype());
  const BufferPair d_key_value(call, "attention.ring_d_key_value", DType::f32);
  const std::vector<Piece> pieces = pieces_of(call.layout);
  std::vector<Work> sums(pieces.size());  // per piece: the gradient of the keys that come next, as far as summed

  pack(call.device, call.key, call.value, key_value.at(0));
  Work arrival = pass_on(call.cp, key_value.at(0), key_value.at(1), "backward key/value", 1);
  zero_packed(call.device, d_key_value.at(1));
  arrival.wait();

  for (int hop = 1; hop < cp; ++hop) {
    const Tensor& held = key_value.at(hop);
    if (hop + 1 < cp) arrival = pass_on(call.cp, held, key_value.at(hop + 1), "backward key/value", hop + 1);
    for (size_t i = 0; i < pieces.size(); ++i) {
      sums[i].wait();
      const Tensor sum = pieces[i].of(call, d_key_value.at(hop));
      add_gradients(call, gradient, rank_at_hop(call.cp, hop), pieces[i].local, packed_half(held, 0),
                    packed_half(held, 1), sum);
      sums[i] = pass_on(call.cp, sum, pieces[i].of(call, d_key_value.at(hop + 1)), "backward d_key/d_value", hop);
    }
    arrival.wait();
  }

  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto [begin, end] = pieces[i].local;
    sums[i].wait();
    const Tensor sum = pieces[i].of(call, d_key_value.at(cp));
    add_gradients(call, gradient, call.cp.rank(), pieces[i].local, call.key, call.value, sum);
    unpack(call.device, sum, d_key.slice(1, begin, end), d_value.slice(1, begin, end));
  }
}

}  // namespace farspan
