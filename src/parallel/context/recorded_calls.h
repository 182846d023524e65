// SPDX-License-Identifier: Apache-2.0
// On the dry device a call of attention is known by what it leaves: ops, messages, buffers. All layers of a model and
// all micro-batches of a plan leave the same, step by step of a ring of hundreds of ranks; so the first call of its
// kind is run, and those that follow repeat what it left, in the same order.
#pragma once

#include <functional>
#include <vector>

#include "parallel/context/context_attention.h"
#include "parallel/rank_context.h"

namespace farspan {

// What one rank's calls of one ContextAttention leave.
class RecordedCalls {
 public:
  // The context's device is dry. It must outlive this.
  explicit RecordedCalls(RankContext& context) : context_(context) {}

  // Leaves what `body` would, a call on rows with this mask; runs it where none like it is known.
  void run(Pass pass, const BatchMask& mask, double dropout, DType dtype, const std::function<void()>& body);

 private:
  struct Call {
    Pass pass = Pass::forward;
    double dropout = 0;
    DType dtype = DType::f32;
    std::vector<IntervalMask> rows;
    std::vector<RowLayout> layouts;

    std::vector<OpCost> ops;
    Traffic traffic;  // of Dimension::cp
    ArenaPassage buffers;
  };
  void record(Call call, const std::function<void()>& body);
  void repeat(const Call& call);

  RankContext& context_;
  std::vector<Call> calls_;
};

}  // namespace farspan
