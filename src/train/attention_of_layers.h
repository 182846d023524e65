// SPDX-License-Identifier: Apache-2.0
// The context-parallel attention of every layer: layers with the same cp_comm_type share one.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "config/config.h"
#include "parallel/context/context_attention.h"
#include "parallel/context/recorded_calls.h"
#include "parallel/rank_context.h"

namespace farspan {

// How a row is dealt to context-parallel ranks; under sequence parallelism their tokens are cut once more.
SequenceLayout sequence_layout_of(const Config& config);

// Of the rank at `tensor_rank` of so many tensor-parallel ones.
ContextAttentionShape attention_shape(const ModelConfig& model, int tensor_size, int tensor_rank);

// How a layer's keys and values travel, `auto` resolved. The same on every rank.
CpCommType resolved_comm_type(const Config& config, const SequenceLayout& layout, int64_t layer);

class AttentionOfLayers {
 public:
  // Adds the groups that a communication type needs to the context; every rank does so at the same point.
  AttentionOfLayers(const Config& config, RankContext& context, const SequenceLayout& layout);

  std::span<const ContextAttention* const> layers() const { return layers_; }  // (L)

 private:
  std::map<CpCommType, std::unique_ptr<ContextAttention>> by_type_;
  std::map<CpCommType, RecordedCalls> recorded_;  // of a dry device
  std::vector<const ContextAttention*> layers_;
};

}  // namespace farspan
