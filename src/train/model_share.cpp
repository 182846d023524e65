// SPDX-License-Identifier: Apache-2.0
#include "train/model_share.h"

#include "parallel/pipeline/layer_split.h"

namespace farspan {

std::vector<ModelChunk> chunks_of_stage(const Config& config, const ResolvedSizes& sizes, int stage) {
  const int stages = static_cast<int>(config.parallel.pipeline_model_parallel_size);
  const std::vector<Span> layers = split_layers({.layers = config.model.num_layers,
                                                 .stages = stages,
                                                 .chunks = static_cast<int>(sizes.pipeline_chunks),
                                                 .first_layers = config.parallel.decoder_first_pipeline_num_layers,
                                                 .last_layers = config.parallel.decoder_last_pipeline_num_layers});
  std::vector<ModelChunk> chunks;
  for (size_t i = static_cast<size_t>(stage); i < layers.size(); i += static_cast<size_t>(stages))
    chunks.push_back({.layers = layers[i], .first = i == 0, .last = i + 1 == layers.size()});
  return chunks;
}

ModelShare model_share(const Config& config, const ResolvedSizes& sizes, int stage, int tensor_rank) {
  const std::vector<ModelChunk> chunks = chunks_of_stage(config, sizes, stage);
  ModelShare share;
  share.tensor_size = static_cast<int>(config.parallel.tensor_model_parallel_size);
  share.tensor_rank = tensor_rank;
  share.sequence_parallel = config.parallel.sequence_parallel;
  share.first_stage = chunks.front().first;
  share.last_stage = chunks.back().last;
  if (config.parallel.zero_stage > 0)
    share.shards = static_cast<int>(sizes.data_parallel_size * config.parallel.context_parallel_size);
  for (const ModelChunk& chunk : chunks) share.chunks.push_back(chunk.layers);
  return share;
}

}  // namespace farspan
