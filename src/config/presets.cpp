// SPDX-License-Identifier: Apache-2.0
#include "config/presets.h"

#include <vector>

namespace farspan {
namespace {

struct Preset {
  std::string_view name;
  int64_t layers, hidden, ffn, heads, groups, head_size, vocab;
  double rotary_base;
  double llama3_factor;  // rope scaling; 1: none
  double epsilon;
  bool untied, qk_norm, qkv_bias;
  int64_t window;  // 0: none
};

// clang-format off
constexpr Preset kPresets[] = {
    // name         layers hidden    ffn heads groups size   vocab    base factor   eps  untied qk_norm  bias  window
    {"llama-3.2-1b",  16,  2048,  8192,  32,   8,   64, 128256, 500000,  32, 1e-5, false, false, false,    0},
    {"llama-3.2-3b",  28,  3072,  8192,  24,   8,  128, 128256, 500000,  32, 1e-5, false, false, false,    0},
    {"llama-3.1-8b",  32,  4096, 14336,  32,   8,  128, 128256, 500000,   8, 1e-5, true,  false, false,    0},
    {"llama-2-7b",    32,  4096, 11008,  32,  32,  128,  32000,  10000,   1, 1e-5, true,  false, false,    0},
    {"qwen3-0.6b",    28,  1024,  3072,  16,   8,  128, 151936,    1e6,   1, 1e-6, false, true,  false,    0},
    {"qwen3-1.7b",    28,  2048,  6144,  16,   8,  128, 151936,    1e6,   1, 1e-6, false, true,  false,    0},
    {"qwen3-8b",      36,  4096, 12288,  32,   8,  128, 151936,    1e6,   1, 1e-6, true,  true,  false,    0},
    {"qwen2.5-0.5b",  24,   896,  4864,  14,   2,   64, 151936,    1e6,   1, 1e-6, false, false, true,     0},
    {"qwen2.5-7b",    28,  3584, 18944,  28,   4,  128, 152064,    1e6,   1, 1e-6, true,  false, true,     0},
    {"mistral-7b",    32,  4096, 14336,  32,   8,  128,  32000,  10000,   1, 1e-5, true,  false, false, 4096},  // v0.1
};
// clang-format on

}  // namespace

std::span<const std::string> preset_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> listed;
    for (const Preset& preset : kPresets) listed.emplace_back(preset.name);
    return listed;
  }();
  return names;
}

bool apply_preset(Config& config, std::string_view name) {
  for (const Preset& preset : kPresets) {
    if (preset.name != name) continue;
    ModelConfig& model = config.model;
    model.preset = preset.name;
    model.num_layers = preset.layers;
    model.hidden_size = preset.hidden;
    model.ffn_hidden_size = preset.ffn;
    model.num_attention_heads = preset.heads;
    model.num_query_groups = preset.groups;
    model.kv_channels = preset.head_size;
    model.vocab_size = preset.vocab;
    model.rotary_base = preset.rotary_base;
    model.norm_epsilon = preset.epsilon;
    model.untie_embeddings_and_output_weights = preset.untied;
    model.qk_layernorm = preset.qk_norm;
    model.add_qkv_bias = preset.qkv_bias;
    model.window_size = {preset.window};
    model.rope_scaling = RopeScalingConfig{};
    if (preset.llama3_factor > 1) {
      model.rope_scaling.type = RopeScalingType::llama3;
      model.rope_scaling.factor = preset.llama3_factor;
    }
    for (const char* field :
         {"num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
          "vocab_size", "rotary_base", "norm_epsilon", "untie_embeddings_and_output_weights", "qk_layernorm",
          "add_qkv_bias", "window_size", "rope_scaling.type", "rope_scaling.factor", "rope_scaling.low_freq_factor",
          "rope_scaling.high_freq_factor", "rope_scaling.original_max_position_embeddings"}) {
      config.origins[std::string("model.") + field] = "preset";
    }
    return true;
  }
  return false;
}

}  // namespace farspan
