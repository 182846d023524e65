// SPDX-License-Identifier: Apache-2.0
#include "config/validate.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "base/error.h"
#include "base/math.h"
#include "config/checks.h"
#include "config/poor_choices.h"
#include "config/reasons.h"
#include "config/this_version.h"

namespace farspan {
namespace {

// How large a tile's fp32 rows may be: enough for matrix products to fill the machine. On a GPU a tile of the loss
// needs thousands of tokens for that.
struct TileBytes {
  int64_t mlp = int64_t{64} << 20;
  int64_t loss = int64_t{64} << 20;
};
constexpr TileBytes kGpuTileBytes = {.mlp = int64_t{512} << 20, .loss = int64_t{1188} << 20};
constexpr int64_t kSmallestTile = 128;  // tokens; below, matrix products no longer fill the machine

template <typename Value>
void derive(Config& config, const char* path, Value& field, Value value) {
  if (field != 0) return;
  field = value;
  config.origins[path] = "derived";
}

// Tokens whose fp32 rows of `width` fill a tile of `bytes`.
int64_t tile_tokens(int64_t width, int64_t bytes) {
  const int64_t tokens = bytes / (width * static_cast<int64_t>(sizeof(float)));
  return std::max(kSmallestTile, round_down(tokens, kSmallestTile));
}

// A list of one value for each layer, all the same, says what the value alone says; checkpoints compare the text.
template <typename Value>
void join_equal_layers(std::vector<Value>& values) {
  if (std::adjacent_find(values.begin(), values.end(), std::not_equal_to<>()) == values.end()) values.resize(1);
}

void derive_hierarchical_sizes(Config& config) {
  ParallelConfig& parallel = config.parallel;
  const bool needed = parallel.context_parallel_size > 1 && uses_comm_type(parallel, CpCommType::a2a_p2p);
  if (!needed || !parallel.hierarchical_context_parallel_sizes.empty()) return;
  parallel.hierarchical_context_parallel_sizes = derived_hierarchical_sizes(config);
  config.origins["parallel.hierarchical_context_parallel_sizes"] = "derived";
}

void derive_all(Config& config, const ResolvedSizes& sizes) {
  ModelConfig& model = config.model;
  TrainingConfig& training = config.training;
  join_equal_layers(model.window_size);
  join_equal_layers(config.parallel.cp_comm_type);
  derive(config, "model.ffn_hidden_size", model.ffn_hidden_size, ffn_hidden_size_of(model));
  derive(config, "model.num_query_groups", model.num_query_groups, kv_heads_of(model));
  derive(config, "model.kv_channels", model.kv_channels, model.hidden_size / model.num_attention_heads);
  derive(config, "model.softmax_scale", model.softmax_scale, 1 / std::sqrt(static_cast<double>(model.kv_channels)));
  if (model.rope_scaling.type == RopeScalingType::none && model.rope_scaling.factor != 1) {
    model.rope_scaling.factor = 1;
    config.origins["model.rope_scaling.factor"] = "derived";
  }
  derive_hierarchical_sizes(config);
  derive(config, "training.global_batch_size", training.global_batch_size,
         training.micro_batch_size * sizes.data_parallel_size);
  if (training.train_iters > 0) {
    // A run may end inside its warm-up.
    derive(config, "optimizer.lr_decay_iters", config.optimizer.lr_decay_iters,
           std::max(training.train_iters, config.optimizer.lr_warmup_iters));
  }
  const TileBytes bytes = training.device == DeviceChoice::cuda ? kGpuTileBytes : TileBytes{};
  derive(config, "memory.mlp_tile_tokens", config.memory.mlp_tile_tokens,
         tile_tokens(model.ffn_hidden_size, bytes.mlp));
  if (model.vocab_size > 0)
    derive(config, "memory.loss_tile_tokens", config.memory.loss_tile_tokens,
           tile_tokens(model.vocab_size, bytes.loss));
}

}  // namespace

ResolvedSizes resolve(Config& config, int world_size, ResolveScope scope) {
  Reasons reasons;
  ResolvedSizes sizes = check_grid(config.parallel, world_size, reasons);
  if (scope == ResolveScope::grid) {
    reasons.throw_if_any();
    return sizes;
  }
  check_model(config, reasons);
  check_model_over_grid(config, sizes, reasons);
  check_run(config, sizes, reasons);
  refuse_absent_features(config, reasons);
  reasons.throw_if_any();

  derive_all(config, sizes);
  sizes.warnings = poor_choices(config, sizes);
  return sizes;
}

int world_size(const Config& config, int64_t ranks) {
  const ParallelConfig& parallel = config.parallel;
  if (ranks < 0) throw ConfigError(fmt::format("--ranks {} is too small; use 1 or more", ranks));
  if (ranks > kMostRanks) throw ConfigError(fmt::format("--ranks {} is too large; use at most {}", ranks, kMostRanks));
  if (ranks > 0) return static_cast<int>(ranks);

  int64_t product = 1;
  for (int64_t size :
       {parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.pipeline_model_parallel_size}) {
    const bool overflow =
        __builtin_mul_overflow(product, std::max<int64_t>(size, 1), &product);  // resolve() refuses sizes < 1
    if (overflow || product > kMostRanks) {
      throw ConfigError(
          fmt::format("tensor_model_parallel_size {} * context_parallel_size {} * pipeline_model_parallel_size "
                      "{} is too large; use at most {} ranks",
                      parallel.tensor_model_parallel_size, parallel.context_parallel_size,
                      parallel.pipeline_model_parallel_size, kMostRanks));
    }
  }
  return static_cast<int>(product);
}

}  // namespace farspan
