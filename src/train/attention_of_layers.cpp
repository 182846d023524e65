// SPDX-License-Identifier: Apache-2.0
#include "train/attention_of_layers.h"

#include <algorithm>

#include "model/parameters.h"
#include "parallel/context/choose_cp_comm_type.h"
#include "parallel/context/hierarchy.h"
#include "train/record.h"

namespace farspan {
namespace {

// The group among `groups` (context-parallel ranks) that this rank is in.
Communicator& add_level(RankContext& context, const std::vector<std::vector<int>>& groups) {
  const Communicator& cp = context.group(Dimension::cp);
  const auto own = std::find_if(groups.begin(), groups.end(), [&](const std::vector<int>& group) {
    return std::find(group.begin(), group.end(), cp.rank()) != group.end();
  });
  FARSPAN_CHECK(own != groups.end(), "hierarchical context parallelism: rank {} of {} is in no group", cp.rank(),
                cp.size());
  std::vector<int> ranks;
  for (int place : *own) ranks.push_back(cp.ranks()[static_cast<size_t>(place)]);
  return context.add_group(std::move(ranks), Dimension::cp);
}

}  // namespace

SequenceLayout sequence_layout_of(const Config& config) {
  const ParallelConfig& parallel = config.parallel;
  return SequenceLayout(parallel.cp_layout, config.data.seq_length, static_cast<int>(parallel.context_parallel_size),
                        parallel.sequence_parallel ? parallel.tensor_model_parallel_size : 1);
}

ContextAttentionShape attention_shape(const ModelConfig& model, int tensor_size, int tensor_rank) {
  const Span heads = query_heads_of(model, tensor_size, tensor_rank);
  return {.heads = heads.length(),
          .kv_heads = key_value_heads_of(model, tensor_size, tensor_rank).length(),
          .head_dim = model.kv_channels,
          .scale = static_cast<float>(model.softmax_scale),
          .first_head = heads.begin};
}

CpCommType resolved_comm_type(const Config& config, const SequenceLayout& layout, int64_t layer) {
  const ParallelConfig& parallel = config.parallel;
  const int tensor_size = static_cast<int>(parallel.tensor_model_parallel_size);
  const DType dtype = compute_dtype(config.training.precision);
  return choose_cp_comm_type(cp_comm_type_of_layer(parallel, layer), layout,
                             attention_shape(config.model, tensor_size, 0), dtype,
                             parallel.hierarchical_context_parallel_sizes,
                             cp_rates(device_kind(config), dtype, tensor_size * parallel.context_parallel_size));
}

AttentionOfLayers::AttentionOfLayers(const Config& config, RankContext& context, const SequenceLayout& layout) {
  const ContextAttentionShape shape =
      attention_shape(config.model, context.group(Dimension::tp).size(), context.group(Dimension::tp).rank());
  const std::vector<int64_t>& hierarchy = config.parallel.hierarchical_context_parallel_sizes;
  const AllGatherOptions all_gather = {.buffer_size = config.communication.cp_allgather_buffer_size,
                                       .overlap = config.communication.cp_allgather_overlap};
  ContextGroups groups = {.cp = &context.group(Dimension::cp)};
  for (int64_t layer = 0; layer < config.model.num_layers; ++layer) {
    const CpCommType type = resolved_comm_type(config, layout, layer);
    std::unique_ptr<ContextAttention>& attention = by_type_[type];
    if (!attention) {
      if (type == CpCommType::a2a_p2p) {
        const HierarchicalSizes sizes = hierarchical_sizes(hierarchy, layout.cp(), shape.heads, shape.kv_heads);
        groups.inner = &add_level(context, inner_groups(sizes));
        groups.outer = &add_level(context, outer_groups(sizes));
      }
      RecordedCalls* recorded = context.device->dry() ? &recorded_.try_emplace(type, context).first->second : nullptr;
      attention = std::make_unique<ContextAttention>(groups, layout, shape, type, all_gather, recorded);
    }
    layers_.push_back(attention.get());
  }
}

}  // namespace farspan
