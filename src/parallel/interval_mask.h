// SPDX-License-Identifier: Apache-2.0
// IntervalMask: for each query position of one row, the key positions [lo, hi) that it sees. Causal, full, sliding
// window, packed documents, prefix and padding are all this one form. Stored as the few facts it follows from (document
// bounds, window, prefix), never as anything of size S, let alone S x S.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/visible_run.h"
#include "parallel/sequence_layout.h"

namespace farspan {

enum class BlockKind { skip, plain, masked };  // no pair visible, all visible, some

struct MaskRule {
  bool causal = true;
  int64_t window =
      0;  // with causal: at most this many keys, the query itself included; without: |q - k| < window; 0: no window
  int64_t prefix = 0;  // the first `prefix` tokens of each document are seen by all of that document's queries
  bool operator==(const MaskRule&) const = default;
};

class IntervalMask {
 public:
  // `documents`: ascending, disjoint spans of the row between which nothing is visible. Positions in no document
  // (padding) see nothing and are seen by nobody. One span [0, S) means no document boundaries. Empty spans are
  // dropped. Throws ConfigError for a negative window or prefix, and for both at once: the keys seen would not be one
  // interval.
  IntervalMask(std::vector<Span> documents, MaskRule rule);

  // Keys visible to the query at `position`; {0, 0} for padding.
  Span visible(int64_t position) const;

  // Writes visible() of positions [queries.begin, queries.end) to lo and hi.
  void fill(Span queries, std::span<int64_t> lo, std::span<int64_t> hi) const;

  // The same as fill(), in a few words: ascending runs that hold every query once, counted from queries.begin. Padding
  // is a run that sees [0, 0).
  std::vector<VisibleRun> visible_runs(Span queries) const;

  // The smallest span that holds every key visible to these queries; {0, 0} when there is none. Neither end ever moves
  // back as queries move on, so spans of ascending queries have ascending ranges.
  Span visible_range(Span queries) const;

  // Both exact, in closed form per document that meets the two spans.
  BlockKind classify(Span queries, Span keys) const;
  int64_t visible_pairs(Span queries, Span keys) const;

  const std::vector<Span>& documents() const { return documents_; }
  const MaskRule& rule() const { return rule_; }
  bool operator==(const IntervalMask&) const = default;

 private:
  std::vector<Span> documents_;
  MaskRule rule_;
};

}  // namespace farspan
