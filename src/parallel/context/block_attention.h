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
  std::vector<VisibleRun> runs;  // AttentionBlock::runs; made for a GPU only
};

// Some of a call's query spans, by row and span; an empty one is all of them.
using SpanSubset = std::vector<std::vector<bool>>;

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
  // (B): the local queries that see anything, ascending, and those that see nothing. Filled by prepare(). In a forward
  // pass where blocks may be united and not all is one causal block, queries that see keys of their own piece of the
  // row alone are spans of their own.
  std::vector<std::vector<QuerySpan>> query_spans = {};
  std::vector<std::vector<LocalSpan>> blind_spans = {};
  // (s) i64 each, taken by prepare() where blocks may be united: lo and hi of a block's queries, counted in its keys.
  Buffer key_lo = {};
  Buffer key_hi = {};

  int rank() const { return cp == nullptr ? 0 : cp->rank(); }
  int ranks() const { return cp == nullptr ? 1 : cp->size(); }
  int64_t local_length() const { return query.dim(1); }
  DType dtype() const { return query.dtype(); }
  void prepare(Pass pass);
  // Whether neighbouring blocks are attended to as one: on a GPU, where every result that is added to another has to be
  // read and written again. Dropout is drawn by position, and what is joined does not stand together in the row.
  bool joins_blocks() const { return device.targets_cuda() && dropout.probability == 0; }
  // Whether blocks of all sorts of masks may be attended to in one call, however many pieces of the row they are.
  bool unites_blocks() const { return key_lo.taken(); }
};

// Which queries, of which heads, no block has met yet in a pass: the first one begins what those that follow add to.
class MetQueries {
 public:
  explicit MetQueries(const AttentionCall& call);
  // Whether these are met for the first time; they are then no longer new. `span`: index into query_spans[row].
  bool meet(int64_t row, size_t span, Span key_value_heads);
  bool is_new(int64_t row, size_t span, Span key_value_heads) const;

 private:
  size_t index(size_t span, Span key_value_heads) const {
    return span * heads_ + static_cast<size_t>(key_value_heads.begin);
  }
  size_t heads_;
  std::vector<std::vector<bool>> met_;  // (B): spans x key/value heads
};

// What backward knows of the output, and where the queries' gradient grows.
struct OutputGradient {
  Tensor out;             // (B, s, A, D), the query's dtype; undefined where this rank does not have it
  Tensor d_out;           // (B, s, A, D), the query's dtype
  Tensor lse;             // (B, A, s) f32, of all keys
  Tensor delta;           // (B, A, s) f32; on a GPU it may be undefined where `out` is not
  Tensor d_query;         // (B, s, A, D) f32, written; with one block a row also the query's dtype
  bool has_delta = true;  // delta, where it is defined, holds values; else the first block that reads them writes them
};

// Keys and values of some segments of one row, wherever they lie, of key/value heads [heads.begin, heads.end).
struct KeyBlock {
  // Ascending; their tokens lie one behind the other. Of received ones neighbours in the row are one, whoever owns
  // them, this rank too where late queries see its keys between others'; where these had them is not read.
  std::span<const Segment> segments;
  Span heads;
  Tensor key;    // (tokens, heads, D)
  Tensor value;  // (tokens, heads, D)
};

// Results of the queries that no block will meet: out (B, s, A, D) = 0, lse (B, A, s) f32 = -inf; d_query = 0.
void finish_blind_queries(const AttentionCall& call, const Tensor& out, const Tensor& lse);
void finish_blind_queries(const AttentionCall& call, const Tensor& d_query);
// delta (B, A, s) f32 from the final out and d_out (B, s, A, D).
void write_delta(Device& device, const Tensor& out, const Tensor& d_out, Tensor delta);

// Adds these keys to the running state of these local queries of their row, or begins it: out (B, s, A, D) f32, where
// each query is met once also the query's dtype; lse (B, A, s) f32. Blocks in which nothing is visible are left out.
void attend_forward(const AttentionCall& call, MetQueries& met, const KeyBlock& keys, const SpanSubset& queries,
                    Tensor out, Tensor lse);

// Adds the same keys' share of d_query, and writes d_key and d_value (tokens, heads, D): f32, with one block a row also
// the key's dtype.
void attend_backward(const AttentionCall& call, MetQueries& met, OutputGradient& gradient, const KeyBlock& keys,
                     Tensor d_key, Tensor d_value);

// This rank's own keys, all heads. d_key, d_value (B, s, K, D), likewise.
void attend_own_forward(const AttentionCall& call, MetQueries& met, const SpanSubset& queries, Tensor out, Tensor lse);
void attend_own_backward(const AttentionCall& call, MetQueries& met, OutputGradient& gradient, Tensor d_key,
                         Tensor d_value);

// Entry i of a tensor's first dimension: the same memory without that dimension.
Tensor entry(const Tensor& x, int64_t i);

}  // namespace farspan
