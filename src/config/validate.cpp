// SPDX-License-Identifier: Apache-2.0
#include "config/validate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/math.h"
#include "config/names.h"
#include "config/reasons.h"
#include "config/this_version.h"
#include "config/value_text.h"

namespace farspan {
namespace {

constexpr int64_t kMostLayers = 10000;  // planning walks every layer
constexpr double kLargestScale = 1e6;   // scores stay finite in fp32

// Any one size or count. Row positions are stored in 32 bits where a token is, and products of two sizes stay in 64.
constexpr int64_t kLargestSize = std::numeric_limits<int32_t>::max();
constexpr int64_t kLargestHeadSize = 256;  // the attention kernels keep a head's row in registers and on the stack
constexpr int64_t kTileBytes = int64_t{64} << 20;
constexpr int64_t kSmallestTile = 128;  // tokens; below, matrix products no longer fill the machine
constexpr size_t kMostAlternatives = 8;

// --- Single values. ---

bool size_fits(std::string_view name, int64_t value, int64_t least, Reasons& reasons) {
  if (value < least) reasons.add("{} {} is too small; use {} or more", name, value, least);
  if (value > kLargestSize) reasons.add("{} {} is too large; use at most {}", name, value, kLargestSize);
  return value >= least && value <= kLargestSize;
}

void check_not_negative(std::string_view name, double value, Reasons& reasons) {
  if (!(value >= 0) || !std::isfinite(value)) reasons.add("{} {} must not be negative; use 0 or more", name, value);
}

void check_positive(std::string_view name, double value, Reasons& reasons) {
  if (!(value > 0) || !std::isfinite(value)) reasons.add("{} {} must be above 0", name, value);
}

// In [0, 1).
void check_fraction(std::string_view name, double value, std::string_view works, Reasons& reasons) {
  if (!(value >= 0 && value < 1)) reasons.add("{} {} must be at least 0 and below 1, such as {}", name, value, works);
}

// The multiples just below (where above 0) and just above `value`.
std::vector<int64_t> multiples_near(int64_t value, int64_t multiple) {
  std::vector<int64_t> near;
  if (value >= multiple) near.push_back(round_down(value, multiple));
  near.push_back(round_down(value, multiple) + multiple);
  return near;
}

// The divisors of `number` nearest to `wanted`, ascending.
std::vector<int64_t> divisors_near(int64_t number, int64_t wanted) {
  std::vector<int64_t> divisors;
  for (int64_t d = 1; d * d <= number; ++d) {
    if (number % d != 0) continue;
    divisors.push_back(d);
    if (d != number / d) divisors.push_back(number / d);
  }
  std::sort(divisors.begin(), divisors.end(),
            [&](int64_t a, int64_t b) { return std::abs(a - wanted) < std::abs(b - wanted); });
  if (divisors.size() > kMostAlternatives) divisors.resize(kMostAlternatives);
  std::sort(divisors.begin(), divisors.end());
  return divisors;
}

// --- The grid. ---

void check_rank_order(const std::string& order, Reasons& reasons) {
  std::array<std::string_view, 4> axes = {"cp", "dp", "pp", "tp"};  // sorted
  bool found_order = false;
  do {
    found_order = found_order || order == fmt::format("{}", fmt::join(axes, "-"));
  } while (std::next_permutation(axes.begin(), axes.end()));
  if (!found_order) {
    reasons.add("rank_order \"{}\" must name tp, cp, dp and pp once each, joined by dashes, such as tp-cp-dp-pp",
                order);
  }
}

ResolvedSizes check_grid(const ParallelConfig& parallel, int world, Reasons& reasons) {
  const int64_t tp = parallel.tensor_model_parallel_size;
  const int64_t cp = parallel.context_parallel_size;
  const int64_t pp = parallel.pipeline_model_parallel_size;
  const bool tp_fits = size_fits("tensor_model_parallel_size", tp, 1, reasons);
  const bool cp_fits = size_fits("context_parallel_size", cp, 1, reasons);
  const bool pp_fits = size_fits("pipeline_model_parallel_size", pp, 1, reasons);
  check_rank_order(parallel.rank_order, reasons);

  ResolvedSizes sizes;
  sizes.world_size = world;
  if (world < 1) reasons.add("world size {} is too small; use --ranks 1 or more", world);
  if (world < 1 || !tp_fits || !cp_fits || !pp_fits) return sizes;

  int64_t model_ranks = 0;  // of one copy of the model
  if (__builtin_mul_overflow(tp * cp, pp, &model_ranks)) model_ranks = std::numeric_limits<int64_t>::max();
  if (world % model_ranks == 0) {
    sizes.data_parallel_size = world / model_ranks;
    return sizes;
  }
  std::vector<std::string> factors;
  if (tp > 1) factors.push_back(fmt::format("tensor_model_parallel_size {}", tp));
  if (cp > 1) factors.push_back(fmt::format("context_parallel_size {}", cp));
  if (pp > 1) factors.push_back(fmt::format("pipeline_model_parallel_size {}", pp));
  const std::string works = model_ranks > kMostRanks
                                ? "use smaller parallel sizes"
                                : fmt::format("use {} ranks", either(multiples_near(world, model_ranks)));
  reasons.add("world {}, need a multiple of {} ({}); {}", world, model_ranks, fmt::join(factors, " * "), works);
  return sizes;
}

// --- The model. ---

void check_heads(const ModelConfig& model, Reasons& reasons) {
  const int64_t heads = model.num_attention_heads;
  const bool hidden_fits = size_fits("hidden_size", model.hidden_size, 1, reasons);
  const bool heads_fit = size_fits("num_attention_heads", heads, 1, reasons);
  const bool groups_fit = size_fits("num_query_groups", model.num_query_groups, 0, reasons);
  if (heads_fit && groups_fit && model.num_query_groups > 0 && heads % model.num_query_groups != 0) {
    reasons.add("num_attention_heads {} is not a multiple of num_query_groups {}; use num_query_groups {}", heads,
                model.num_query_groups, either(divisors_near(heads, model.num_query_groups)));
  }
  if (!size_fits("kv_channels", model.kv_channels, 0, reasons) || !hidden_fits || !heads_fit) return;

  int64_t head_size = model.kv_channels;
  if (head_size == 0 && model.hidden_size % heads != 0) {
    reasons.add("hidden_size {} is not a multiple of num_attention_heads {}; use hidden_size {}, or give kv_channels",
                model.hidden_size, heads, either(multiples_near(model.hidden_size, heads)));
    return;
  }
  if (head_size == 0) head_size = model.hidden_size / heads;
  const char* derived = model.kv_channels == 0 ? " (hidden_size / num_attention_heads)" : "";
  if (head_size > kLargestHeadSize) {
    reasons.add("kv_channels {}{} is too large; use {} or less", head_size, derived, kLargestHeadSize);
  } else if (head_size % 2 != 0) {
    reasons.add("kv_channels {}{} is odd, but rotary embedding turns channels in pairs; use {}", head_size, derived,
                either(multiples_near(head_size, 2)));
  }
}

void check_rope_scaling(const Config& config, Reasons& reasons) {
  const RopeScalingConfig& scaling = config.model.rope_scaling;
  if (scaling.type == RopeScalingType::none) {
    const auto origin = config.origins.find("model.rope_scaling.factor");
    const bool from_preset = origin != config.origins.end() && origin->second == "preset";
    if (scaling.factor != 1 && !from_preset) {
      reasons.add(
          "rope_scaling.factor {} does nothing with rope_scaling.type none; use type linear, ntk, yarn or llama3, or "
          "factor 1",
          scaling.factor);
    }
    return;
  }
  if (!(scaling.factor >= 1) || !std::isfinite(scaling.factor)) {
    reasons.add("rope_scaling.factor {} must be at least 1", scaling.factor);
  }
  const bool llama3 = scaling.type == RopeScalingType::llama3;
  const bool yarn = scaling.type == RopeScalingType::yarn;
  if (llama3 || yarn) {
    size_fits("rope_scaling.original_max_position_embeddings", scaling.original_max_position_embeddings, 1, reasons);
  }
  if (llama3 && !(scaling.low_freq_factor > 0 && scaling.high_freq_factor > scaling.low_freq_factor)) {
    reasons.add("rope_scaling.low_freq_factor {} must be above 0 and below high_freq_factor {}, such as 1 and 4",
                scaling.low_freq_factor, scaling.high_freq_factor);
  }
  if (yarn && !(scaling.beta_slow > 0 && scaling.beta_fast > scaling.beta_slow)) {
    reasons.add("rope_scaling.beta_slow {} must be above 0 and below beta_fast {}, such as 1 and 32", scaling.beta_slow,
                scaling.beta_fast);
  }
}

void check_model(const Config& config, Reasons& reasons) {
  const ModelConfig& model = config.model;
  size_fits("num_layers", model.num_layers, 1, reasons);
  if (model.num_layers > kMostLayers)
    reasons.add("num_layers {} is more than any model this version plans; use at most {}", model.num_layers,
                kMostLayers);
  check_heads(model, reasons);
  size_fits("ffn_hidden_size", model.ffn_hidden_size, 0, reasons);
  size_fits("vocab_size", model.vocab_size, 0, reasons);
  size_fits("window_size", model.window_size, 0, reasons);
  check_positive("rotary_base", model.rotary_base, reasons);
  check_rope_scaling(config, reasons);
  check_positive("norm_epsilon", model.norm_epsilon, reasons);
  check_not_negative("softmax_scale", model.softmax_scale, reasons);
  if (model.softmax_scale > kLargestScale)
    reasons.add("softmax_scale {} is beyond fp32; use at most {}, or 0 for 1 / sqrt(kv_channels)", model.softmax_scale,
                kLargestScale);
  check_fraction("attention_dropout", model.attention_dropout, "0", reasons);
  check_fraction("hidden_dropout", model.hidden_dropout, "0", reasons);
  check_not_negative("init_method_std", model.init_method_std, reasons);
}

// --- Data, steps and the rest. ---

// One weight, or two: "95,5". The training part's must be above 0.
void check_split(const std::string& split, Reasons& reasons) {
  std::vector<double> weights;
  bool good = true;
  try {
    for (const std::string& part : split_commas(split)) weights.push_back(read_real(part));
  } catch (const ValueError&) {
    good = false;
  }
  good = good && (weights.size() == 1 || weights.size() == 2) && weights[0] > 0 && weights.back() >= 0;
  if (!good) {
    reasons.add("split \"{}\" must be the weights of the training and the held-out part, such as 95,5 or 100,0", split);
  }
}

int64_t check_batches(const TrainingConfig& training, const ResolvedSizes& sizes, Reasons& reasons) {
  const bool micro_fits = size_fits("micro_batch_size", training.micro_batch_size, 1, reasons);
  const bool global_fits = size_fits("global_batch_size", training.global_batch_size, 0, reasons);
  if (!micro_fits || !global_fits) return 1;
  const int64_t rows_at_once = training.micro_batch_size * sizes.data_parallel_size;
  if (rows_at_once > kLargestSize) {
    reasons.add("micro_batch_size {} * data-parallel size {} is too large; use at most {} rows",
                training.micro_batch_size, sizes.data_parallel_size, kLargestSize);
    return 1;
  }
  if (training.global_batch_size % rows_at_once == 0)
    return std::max<int64_t>(training.global_batch_size / rows_at_once, 1);

  std::string works =
      fmt::format("use global_batch_size {}", either(multiples_near(training.global_batch_size, rows_at_once)));
  if (training.global_batch_size % sizes.data_parallel_size == 0) {
    const int64_t rows_of_rank = training.global_batch_size / sizes.data_parallel_size;
    works += fmt::format(", or micro_batch_size {}", either(divisors_near(rows_of_rank, training.micro_batch_size)));
  }
  reasons.add("global_batch_size {} is not a multiple of micro_batch_size {} * data-parallel size {}; {}",
              training.global_batch_size, training.micro_batch_size, sizes.data_parallel_size, works);
  return 1;
}

void check_training(const TrainingConfig& training, Reasons& reasons) {
  size_fits("train_iters", training.train_iters, 0, reasons);
  if (training.seed < 0) reasons.add("seed {} is negative; use 0 or more", training.seed);
  size_fits("eval_interval", training.eval_interval, 0, reasons);
  size_fits("eval_iters", training.eval_iters, 0, reasons);
  size_fits("log_interval", training.log_interval, 1, reasons);
}

void check_optimizer(const OptimizerConfig& optimizer, Reasons& reasons) {
  check_not_negative("lr", optimizer.lr, reasons);
  check_not_negative("min_lr", optimizer.min_lr, reasons);
  if (optimizer.lr >= 0 && optimizer.min_lr > optimizer.lr) {
    reasons.add("min_lr {} is above lr {}; use at most {}", optimizer.min_lr, optimizer.lr, optimizer.lr);
  }
  const bool warmup_fits = size_fits("lr_warmup_iters", optimizer.lr_warmup_iters, 0, reasons);
  const bool decay_fits = size_fits("lr_decay_iters", optimizer.lr_decay_iters, 0, reasons);
  if (warmup_fits && decay_fits && optimizer.lr_decay_iters > 0 &&
      optimizer.lr_warmup_iters > optimizer.lr_decay_iters) {
    reasons.add("lr_warmup_iters {} is more than lr_decay_iters {}, of which it is part; use {} or less",
                optimizer.lr_warmup_iters, optimizer.lr_decay_iters, optimizer.lr_decay_iters);
  }
  check_not_negative("weight_decay", optimizer.weight_decay, reasons);
  check_fraction("adam_beta1", optimizer.adam_beta1, "0.9", reasons);
  check_fraction("adam_beta2", optimizer.adam_beta2, "0.95", reasons);
  check_positive("adam_eps", optimizer.adam_eps, reasons);
  check_not_negative("clip_grad", optimizer.clip_grad, reasons);
}

void check_memory(const MemoryConfig& memory, Reasons& reasons) {
  constexpr std::array<std::string_view, 4> kModules = {"layernorm", "qkv", "attn_proj", "mlp"};
  for (const std::string& module : memory.recompute_modules) {
    if (std::find(kModules.begin(), kModules.end(), module) != kModules.end()) continue;
    reasons.add("recompute_modules names \"{}\"; use any of {}", module, fmt::join(kModules, ", "));
  }
  if (!memory.recompute_modules.empty() && memory.recompute_granularity != Recompute::selective) {
    reasons.add("recompute_modules does nothing with recompute_granularity {}; use selective, or leave the modules out",
                choice_name(memory.recompute_granularity));
  }
  size_fits("mlp_tile_tokens", memory.mlp_tile_tokens, 0, reasons);
  size_fits("loss_tile_tokens", memory.loss_tile_tokens, 0, reasons);
  if (memory.memory_limit < 0)
    reasons.add("memory_limit {} is negative; use bytes, or 0 for no limit", memory.memory_limit);
}

// --- What follows from the rest. ---

template <typename Value>
void derive(Config& config, const char* path, Value& field, Value value) {
  if (field != 0) return;
  field = value;
  config.origins[path] = "derived";
}

// Tokens whose fp32 rows of `width` fill a tile.
int64_t tile_tokens(int64_t width) {
  const int64_t tokens = kTileBytes / (width * static_cast<int64_t>(sizeof(float)));
  return std::max(kSmallestTile, round_down(tokens, kSmallestTile));
}

void derive_all(Config& config, const ResolvedSizes& sizes) {
  ModelConfig& model = config.model;
  TrainingConfig& training = config.training;
  derive(config, "model.ffn_hidden_size", model.ffn_hidden_size, round_up(ceil_div(8 * model.hidden_size, 3), 64));
  derive(config, "model.num_query_groups", model.num_query_groups, model.num_attention_heads);
  derive(config, "model.kv_channels", model.kv_channels, model.hidden_size / model.num_attention_heads);
  derive(config, "model.softmax_scale", model.softmax_scale, 1 / std::sqrt(static_cast<double>(model.kv_channels)));
  if (model.rope_scaling.type == RopeScalingType::none && model.rope_scaling.factor != 1) {
    model.rope_scaling.factor = 1;
    config.origins["model.rope_scaling.factor"] = "derived";
  }
  derive(config, "training.global_batch_size", training.global_batch_size,
         training.micro_batch_size * sizes.data_parallel_size);
  if (training.train_iters > 0) {
    // A run may end inside its warm-up.
    derive(config, "optimizer.lr_decay_iters", config.optimizer.lr_decay_iters,
           std::max(training.train_iters, config.optimizer.lr_warmup_iters));
  }
  derive(config, "memory.mlp_tile_tokens", config.memory.mlp_tile_tokens, tile_tokens(model.ffn_hidden_size));
  if (model.vocab_size > 0) {
    derive(config, "memory.loss_tile_tokens", config.memory.loss_tile_tokens, tile_tokens(model.vocab_size));
  }
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
  size_fits("seq_length", config.data.seq_length, 2, reasons);
  check_split(config.data.split, reasons);
  check_training(config.training, reasons);
  sizes.micro_batches = check_batches(config.training, sizes, reasons);
  check_optimizer(config.optimizer, reasons);
  check_memory(config.memory, reasons);
  check_positive("distributed_timeout_seconds", config.communication.distributed_timeout_seconds, reasons);
  size_fits("save_interval", config.output.save_interval, 0, reasons);
  size_fits("keep", config.output.keep, 0, reasons);
  if (config.output.load_weights_only && config.output.load.empty()) {
    reasons.add("load_weights_only true does nothing without load; name a checkpoint in load, or use false");
  }
  refuse_absent_features(config, reasons);
  reasons.throw_if_any();

  derive_all(config, sizes);
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
