// SPDX-License-Identifier: Apache-2.0
// What every context-parallel schedule shares: one attention call as a rank sees it, and the step "attend to the keys
// and values of some tokens of some rank". A schedule only decides in which order keys and values come by and where
// their gradients go.
#pragma once

#include <vector>

#include "parallel/context/context_attention.h"

namespace farspan {

// Consecutive row positions that lie one after the other in a rank's local memory, from local token `local_begin` on.
struct LocalSpan {
  Span positions;
  int64_t local_begin = 0;
};

// The row positions of local tokens [local.begin, local.end) of a rank; chunks that touch are one span (the last rank
// of a zigzag owns two neighbours), so their keys make one block.
std::vector<LocalSpan> local_spans(const SequenceLayout& layout, int rank, Span local);

// The inputs of one call.
struct AttentionCall {
  Device& device;
  Arena& arena;
  Communicator& cp;
  const SequenceLayout& layout;
  ContextAttentionShape shape;
  const BatchMask& mask;
  Tensor query;  // (B, s, A, D)
  Tensor key;    // (B, s, K, D)
  Tensor value;  // (B, s, K, D)

  int64_t rows() const { return query.dim(0); }
  DType dtype() const { return query.dtype(); }
  // Keys and values side by side, as they travel: (2, B, tokens, K, D).
  Shape packed_shape(int64_t tokens) const { return {2, rows(), tokens, shape.kv_heads, shape.head_dim}; }
};

// What backward knows of the output, and where the queries' gradient grows.
struct OutputGradient {
  Tensor d_out;    // (B, s, A, D), the query's dtype
  Tensor lse;      // (B, A, s) f32, of all keys
  Tensor delta;    // (B, A, s) f32
  Tensor d_query;  // (B, s, A, D) f32, added to
};

// The running state before any key: out (B, s, A, D) f32 = 0, lse (B, A, s) f32 = -inf.
void start_state(const AttentionCall& call, Tensor out, Tensor lse);
// gradient.delta from the final out (B, s, A, D).
void write_delta(const AttentionCall& call, const Tensor& out, const OutputGradient& gradient);

// Adds to the running state the keys of local tokens `local` of `key_rank`, for all local queries and rows. key, value
// (B, local.length(), K, D); out (B, s, A, D) f32; lse (B, A, s) f32. Blocks in which nothing is visible are left out.
void attend_forward(const AttentionCall& call, int key_rank, Span local, const Tensor& key, const Tensor& value,
                    Tensor out, Tensor lse);

// Adds the same keys' share of the gradients. d_key, d_value (B, local.length(), K, D) f32.
void attend_backward(const AttentionCall& call, const OutputGradient& gradient, int key_rank, Span local,
                     const Tensor& key, const Tensor& value, Tensor d_key, Tensor d_value);

// Halves of a packed buffer (2, B, tokens, K, D), each (B, tokens, K, D): 0 the keys (or their gradient), 1 the values.
Tensor packed_half(const Tensor& packed, int half);
// Writes keys and values (B, tokens, K, D) to a packed buffer.
void pack(Device& device, const Tensor& key, const Tensor& value, Tensor packed);
// And back, rounding to the dtype of `key` and `value`.
void unpack(Device& device, const Tensor& packed, Tensor key, Tensor value);
// One packed buffer, or several in a row, = 0.
void zero_packed(Device& device, const Tensor& packed);

// The schedules. Forward adds all ranks' keys to the running state out (B, s, A, D) f32, lse (B, A, s) f32. Backward
// adds to gradient.d_query and writes d_key, d_value (B, s, K, D) in the key's dtype.
void local_forward(const AttentionCall& call, Tensor out, Tensor lse);  // cp = 1
void local_backward(const AttentionCall& call, const OutputGradient& gradient, Tensor d_key, Tensor d_value);
void ring_forward(const AttentionCall& call, Tensor out, Tensor lse);
void ring_backward(const AttentionCall& call, const OutputGradient& gradient, Tensor d_key, Tensor d_value);
void all_gather_forward(const AttentionCall& call, Tensor out, Tensor lse);
void all_gather_backward(const AttentionCall& call, const OutputGradient& gradient, Tensor d_key, Tensor d_value);

}  // namespace farspan
