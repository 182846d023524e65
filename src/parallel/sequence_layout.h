// SPDX-License-Identifier: Apache-2.0
// Which rank of a context-parallel group owns which tokens of a row.
//
// SequenceLayout is what is fixed for a run: the policy, S, cp, and s, the tokens of a row on every rank. RowLayout
// says who owns what in one row. Under zigzag and contiguous all rows are alike; under balanced it follows from the
// row's documents (parallel/balanced_layout.h).
//
// The row's S tokens are padded inside to cp * s. Zigzag cuts 2 * cp equal chunks and rank r owns chunks r and
// 2 * cp - 1 - r, so that under a causal mask every rank has the same work; contiguous cuts cp chunks and rank r owns
// chunk r. Pad tokens come last in the row, see nothing, are seen by nobody and are never targets. Users never meet a
// "multiple of 2 * cp" rule. Zigzag: as in Llama 3 (2024), section 3.3.2, and ring-flash-attention.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "config/config.h"

namespace farspan {

// Token positions [begin, end) of a row.
struct Span {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t length() const { return end > begin ? end - begin : 0; }
  bool empty() const { return end <= begin; }
  bool operator==(const Span&) const = default;
};

// The positions that both hold; begin == end when there are none.
Span intersect(Span a, Span b);

// Consecutive row positions that lie one after the other in a rank's memory, from local token `local_begin` on.
struct LocalSpan {
  Span positions;
  int64_t local_begin = 0;
  bool operator==(const LocalSpan&) const = default;
};

class RowLayout {
 public:
  RowLayout() = default;
  // The positions of each rank, in any order; those that touch become one span. Throws InternalError unless all ranks
  // own the same number of positions and, together, each of [0, all positions) once.
  explicit RowLayout(std::vector<std::vector<Span>> owned);

  int cp() const { return first_.empty() ? 0 : static_cast<int>(first_.size()) - 1; }
  int64_t local_length() const { return local_length_; }  // s

  // The spans of a rank in ascending position, which is also their order in its memory; no two of them touch.
  std::span<const LocalSpan> spans(int rank) const;
  // Position in the row of local token i of a rank.
  int64_t position(int rank, int64_t i) const;
  bool operator==(const RowLayout&) const = default;

 private:
  std::vector<LocalSpan> spans_;  // rank-major
  std::vector<size_t> first_;     // (cp + 1): where a rank's spans begin
  int64_t local_length_ = 0;
};

// The row as groups of `members` neighbouring ranks own it together: rank o of the result has the tokens of ranks
// [o members, (o + 1) members). A zigzag stays a zigzag. `members` divides cp.
RowLayout merge_ranks(const RowLayout& layout, int members);

class SequenceLayout {
 public:
  // s is rounded up to a multiple of `multiple` (tensor parallelism's size where it cuts the sequence further). Throws
  // ConfigError for a length, cp or multiple below 1. With cp = 1 every policy gives the one rank the whole row.
  SequenceLayout(CpLayout policy, int64_t seq_length, int cp, int64_t multiple = 1);

  CpLayout policy() const { return policy_; }
  int cp() const { return cp_; }
  int64_t seq_length() const { return seq_length_; }             // real tokens of a row at most
  int64_t local_length() const { return local_length_; }         // s: tokens of a row on one rank
  int64_t padded_length() const { return local_length_ * cp_; }  // of all ranks together
  int64_t chunk_length() const { return local_length_ / chunks_per_rank_; }
  int chunks_per_rank() const { return chunks_per_rank_; }  // pieces that the policy cuts for a rank; balanced: 1

  bool same_for_all_rows() const { return rows_.cp() > 0; }
  // The layout of every row. Throws InternalError when they differ (balanced with cp > 1).
  const RowLayout& every_row() const;

 private:
  CpLayout policy_;
  int cp_;
  int64_t seq_length_;
  int64_t local_length_;
  int chunks_per_rank_;
  RowLayout rows_;
};

}  // namespace farspan
