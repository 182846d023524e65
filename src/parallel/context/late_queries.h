// SPDX-License-Identifier: Apache-2.0
// Which queries wait for the keys that others bring.
//
// A query that sees keys of other ranks too is usually attended to twice: with this rank's keys while the others
// travel, and with theirs when they are here, its fp32 results being written, read and written again. Where a row's
// documents are short beside a rank's part of it, many queries see no other rank's keys at all. If those are enough to
// do until the others' keys are here, or nearly, the rest can wait: it is then attended to once, with all its keys, as
// are the others, and results are written once, rounded where the caller wants them so. The keys of this rank that they
// see are copied in between those that travelled, in the order of the row.
//
// Forward only: most of what backward writes twice are gradients of keys. On a GPU, where a rank's queries are not one
// plain or causal block (which is one call as it is) and where all that a rank is brought comes in one step.
#pragma once

#include <vector>

#include "parallel/context/key_schedule.h"

namespace farspan {

class LateQueries {
 public:
  // None wait.
  LateQueries() = default;
  // `call`: prepared for forward.
  LateQueries(const AttentionCall& call, const KeySchedule& schedule);

  bool any() const { return !own_keys_.empty(); }

  // Of AttentionCall::query_spans: those that see this rank's keys alone, and those that wait. Where none wait both are
  // empty, which stands for all.
  const SpanSubset& early() const { return early_; }
  const SpanSubset& late() const { return late_; }

  // This rank's keys that those which wait see; rows, then positions, ascending.
  const std::vector<Segment>& own_keys() const { return own_keys_; }

 private:
  SpanSubset early_, late_;
  std::vector<Segment> own_keys_;
};

}  // namespace farspan
