// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <iterator>
#include <string>

#include "base/math.h"
#include "config/checks.h"
#include "config/names.h"

namespace farspan {
namespace {

constexpr int64_t kMostLayers = 10000;     // planning walks every layer
constexpr double kLargestScale = 1e6;      // scores stay finite in fp32
constexpr int64_t kLargestHeadSize = 256;  // the attention kernels keep a head's row in registers and on the stack

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

// Parameters of another type of scaling than the one asked for. What a preset gives goes with the preset's type.
void check_rope_scaling_unused(const Config& config, Reasons& reasons) {
  using enum RopeScalingType;
  const RopeScalingConfig& scaling = config.model.rope_scaling;
  const RopeScalingConfig defaults;
  const auto unused = [&](std::string_view name, double value, double fallback,
                          std::initializer_list<RopeScalingType> users) {
    if (value == fallback || std::find(users.begin(), users.end(), scaling.type) != users.end()) return;
    const auto origin = config.origins.find(fmt::format("model.rope_scaling.{}", name));
    if (origin != config.origins.end() && origin->second == "preset") return;
    std::vector<std::string_view> types;
    for (RopeScalingType user : users) types.push_back(choice_name(user));
    reasons.add("rope_scaling.{} {} does nothing with rope_scaling.type {}; use type {}, or {} {}", name, value,
                choice_name(scaling.type), fmt::join(types, " or "), name, fallback);
  };
  unused("factor", scaling.factor, defaults.factor, {linear, ntk, yarn, llama3});
  unused("low_freq_factor", scaling.low_freq_factor, defaults.low_freq_factor, {llama3});
  unused("high_freq_factor", scaling.high_freq_factor, defaults.high_freq_factor, {llama3});
  unused("original_max_position_embeddings", static_cast<double>(scaling.original_max_position_embeddings),
         static_cast<double>(defaults.original_max_position_embeddings), {llama3, yarn});
  unused("beta_fast", scaling.beta_fast, defaults.beta_fast, {yarn});
  unused("beta_slow", scaling.beta_slow, defaults.beta_slow, {yarn});
}

void check_rope_scaling(const Config& config, Reasons& reasons) {
  const RopeScalingConfig& scaling = config.model.rope_scaling;
  check_rope_scaling_unused(config, reasons);
  if (scaling.type == RopeScalingType::none) return;
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

void check_per_layer(std::string_view name, int64_t values, int64_t layers, Reasons& reasons) {
  if (values == 1 || values == layers) return;
  reasons.add("{} has {} values for {} layers; give 1, or {}", name, values, layers, layers);
}

}  // namespace

void check_model(const Config& config, Reasons& reasons) {
  const ModelConfig& model = config.model;
  size_fits("num_layers", model.num_layers, 1, reasons);
  if (model.num_layers > kMostLayers)
    reasons.add("num_layers {} is more than any model this version plans; use at most {}", model.num_layers,
                kMostLayers);
  check_heads(model, reasons);
  size_fits("ffn_hidden_size", model.ffn_hidden_size, 0, reasons);
  size_fits("vocab_size", model.vocab_size, 0, reasons);
  for (int64_t window : model.window_size) size_fits("window_size", window, 0, reasons);
  check_per_layer("window_size", std::ssize(model.window_size), model.num_layers, reasons);
  check_per_layer("cp_comm_type", std::ssize(config.parallel.cp_comm_type), model.num_layers, reasons);
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

int64_t kv_heads_of(const ModelConfig& model) {
  return model.num_query_groups > 0 ? model.num_query_groups : model.num_attention_heads;
}

int64_t ffn_hidden_size_of(const ModelConfig& model) {
  return model.ffn_hidden_size > 0 ? model.ffn_hidden_size : round_up(ceil_div(8 * model.hidden_size, 3), 64);
}

}  // namespace farspan
