// SPDX-License-Identifier: Apache-2.0
// What every context-parallel schedule shares: one attention call as a rank sees it, and the step "attend to the keys
// and values of this segment". A schedule only decides in which order keys and values come by and where their gradients
// go.
#pragma once

#include <span>
#include <vector>

#include "parallel/context/context_attention.h"

namespace farspan {

// Who owns which tokens, and who sees whom, in the B rows of a call.
struct DealtRows {
  std::span<const RowLayout> layouts;   // (B) over the ranks among which keys travel
  std::span<const IntervalMask> masks;  // (B)
  int64_t count() const { return std::ssize(masks); }
  int64_t local_length() const { return layouts[0].local_length(); }
};

// Keys of one row that one rank owns, consecutive both in the row and in that rank's memory.
struct Segment {
  int64_t row = 0;
  LocalSpan keys;
  int64_t tokens() const { return keys.positions.length(); }
};

// Local queries of one row, consecutive likewise, and the smallest span of keys that holds all they see.
struct QuerySpan {
  LocalSpan queries;
  Span sees;
};

// The inputs of one call: B rows of s local tokens, A query heads, K key/value heads.
struct AttentionCall {
  Device& device;
  Arena& arena;
  Communicator* cp;  // among whose ranks keys travel; null when this rank owns every key
  DealtRows rows;
  ContextAttentionShape shape;
  AttentionDropout dropout;          // row and first_head are filled in block by block
  std::span<const int64_t> row_ids;  // (B); read with dropout only
  Tensor lo;                         // (B, s) i64
  Tensor hi;                         // (B, s) i64
  Tensor query;                      // (B, s, A, D)
  Tensor key;                        // (B, s, K, D)
  Tensor value;                      // (B, s, K, D)
  // (B): the local queries that see anything, ascending. Filled by prepare().
  std::vector<std::vector<QuerySpan>> query_spans = {};

  int rank() const { return cp == nullptr ? 0 : cp->rank(); }
  int ranks() const { return cp == nullptr ? 1 : cp->size(); }
  int64_t local_length() const { return query.dim(1); }
  DType dtype() const { return query.dtype(); }
  void prepare();
};

// What backward knows of the output, and where the queries' gradient grows.
struct OutputGradient {
  Tensor d_out;    // (B, s, A, D), the query's dtype
  Tensor lse;      // (B, A, s) f32, of all keys
  Tensor delta;    // (B, A, s) f32
  Tensor d_query;  // (B, s, A, D) f32, added to
};

// The keys and values of a segment, wherever they lie, of key/value heads [heads.begin, heads.end).
struct KeyBlock {
  Segment segment;
  Span heads;
  Tensor key;    // (tokens, heads, D)
  Tensor value;  // (tokens, heads, D)
};

// The running state before any key: out (B, s, A, D) f32 = 0, lse (B, A, s) f32 = -inf.
void start_state(const AttentionCall& call, Tensor out, Tensor lse);
// delta (B, A, s) f32 from the final out and d_out (B, s, A, D).
void write_delta(Device& device, const Tensor& out, const Tensor& d_out, Tensor delta);

// Adds one segment's keys to the running state of all local queries of its row: out (B, s, A, D) f32; lse (B, A, s)
// f32. Blocks in which nothing is visible are left out.
void attend_forward(const AttentionCall& call, const KeyBlock& keys, Tensor out, Tensor lse);

// Adds the same keys' share of the gradients. d_key, d_value (tokens, heads, D) f32.
void attend_backward(const AttentionCall& call, const OutputGradient& gradient, const KeyBlock& keys, Tensor d_key,
                     Tensor d_value);

// This rank's own keys, all heads. d_key, d_value (B, s, K, D) f32.
void attend_own_forward(const AttentionCall& call, Tensor out, Tensor lse);
void attend_own_backward(const AttentionCall& call, const OutputGradient& gradient, Tensor d_key, Tensor d_value);

// Entry i of a tensor's first dimension: the same memory without that dimension.
Tensor entry(const Tensor& x, int64_t i);

}  // namespace farspan
