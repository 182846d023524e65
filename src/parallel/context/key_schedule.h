// SPDX-License-Identifier: Apache-2.0
// Which keys and values travel between whom, and in which order: the difference between p2p and all_gather, as data.
//
// A rank needs those keys that some query of its own sees; nothing else is ever sent. Who needs what follows from the
// rows' layouts and masks, so every rank works out all ranks' needs and nobody has to ask. A schedule is a list of
// steps; in a step a rank sends parcels of its keys and values straight to the ranks that need them, and receives
// others. All ranks of the group have the same steps, with empty hands in some; a step in which nobody has anything
// does not exist.
//
//   p2p         step (hop h, piece): from rank r - h, to rank r + h (mod cp); all heads. What a hop needs is cut in
//               equal pieces of at most a quarter of a rank's tokens, so that three small buffers hold all that travels
//               and no rank waits for another that has more to compute on a piece. Hops that fit in a buffer together
//               are one step: those that bring little, as masks of documents leave it (in forward in both buffers that
//               take turns), and on a GPU two of short parts of a row.
//   all_gather  step (head group): from all ranks, to all ranks; some key/value heads at a time, so many that the
//               buffers stay within a limit. Where the mask leaves out keys, there is room for more heads.
//
// The sizes of the buffers follow from layout and shape alone, never from the mask: memory is planned before data is
// seen.
#pragma once

#include <string>
#include <vector>

#include "parallel/context/block_attention.h"

namespace farspan {

// What one rank sends another in one step: key/value heads ExchangeStep::heads of these tokens.
struct Parcel {
  int peer = 0;                   // within the group
  std::vector<Segment> segments;  // rows, then positions, ascending; local_begin is the owner's
  int64_t tokens = 0;
};

struct ExchangeStep {
  std::string name;  // "hop 2.1", "hops 1-3", "heads 0-3"
  Span heads;        // of the key/value heads
  std::vector<Parcel> sends;
  std::vector<Parcel> receives;
  bool whole = false;  // of one peer each way, whose parcel is one message and lies alone in the step's buffer
};

// What a schedule's buffers must hold, known before any mask is.
struct ScheduleSizes {
  int64_t heads = 0;     // key/value heads of a step
  int64_t capacity = 0;  // tokens times heads that one step brings, or takes home gradients of, at most
  int64_t sent = 0;      // tokens times heads that one step sends at most, each once
  bool several = false;  // there can be more than one step
  bool overlap = true;   // the next step's parcels travel while this one's are used

  // Buffers of keys and values that are received into, and of gradients that are computed into; two take turns.
  int buffers() const { return several && overlap ? 2 : 1; }
};

// Tokens of a piece of p2p: a quarter of a rank's, and not less than is worth the meeting of the ranks that it costs;
// but no more than so many hops bring.
struct PieceRule {
  int64_t least_tokens = 0;
  int most_hops = 1;
};
inline constexpr PieceRule kPiecesOnCpu{.least_tokens = 256};
// On a GPU the result of each piece is added to the running state by reading and writing that once, which costs 1 % of
// the time of a block of this many keys.
inline constexpr PieceRule kPiecesOnGpu{.least_tokens = 32768, .most_hops = 2};

// `own_tokens`: B s, tokens of all rows on one rank.
ScheduleSizes p2p_sizes(int64_t own_tokens, int ranks, const ContextAttentionShape& shape, const PieceRule& rule);
ScheduleSizes all_gather_sizes(int64_t own_tokens, int ranks, const ContextAttentionShape& shape, DType dtype,
                               Pass pass, const AllGatherOptions& options);
// Bytes of all communication buffers of a pass: keys and values, and in backward fp32 gradients.
int64_t buffer_bytes(const ScheduleSizes& sizes, const ContextAttentionShape& shape, DType dtype, Pass pass);

struct KeySchedule {
  ScheduleSizes sizes;
  std::vector<ExchangeStep> steps;
};

// For every pair of ranks, which of the one's keys the other's queries see.
class KeyNeeds {
 public:
  KeyNeeds(const DealtRows& rows, int ranks);
  // Rows, then positions, ascending.
  std::vector<Segment> segments(int reader, int owner) const;
  int64_t tokens(int reader, int owner) const;

 private:
  template <typename Body>
  void for_each(int reader, int owner, Body&& body) const;

  DealtRows rows_;
  std::vector<std::vector<Span>> wanted_;  // by reader and row: keys that some query sees, ascending, joined
};

KeySchedule p2p_schedule(const AttentionCall& call, Pass pass);
KeySchedule all_gather_schedule(const AttentionCall& call, Pass pass, const AllGatherOptions& options);

class LateQueries;  // parallel/context/late_queries.h

// Runs a schedule: this rank's own keys, then those of the steps in order; in forward queries that are `late` see both
// together. Forward writes the running state out (B, s, A, D) f32, lse (B, A, s) f32. Backward writes gradient.d_query,
// f32, and d_key, d_value (B, s, K, D), in fp32 or the key's dtype: the own share first, then the visitors' in the
// order of the steps and their sends. Where the device writes rounded results (attention_writes_rounded) and each query
// is attended to once (one rank has all keys, or LateQueries::any), out may be of the query's dtype; so may d_query
// where one rank has all keys, and no sum is made.
void run_forward(const AttentionCall& call, const KeySchedule& schedule, const LateQueries& late, Tensor out,
                 Tensor lse);
void run_backward(const AttentionCall& call, const KeySchedule& schedule, const OutputGradient& gradient, Tensor d_key,
                  Tensor d_value);

}  // namespace farspan
