// SPDX-License-Identifier: Apache-2.0
#include "model/parameters.h"

#include <algorithm>
#include <cmath>

#include "base/math.h"
#include "base/philox.h"
#include "device/parallel_for.h"

namespace farspan {

ParameterTable::ParameterTable(const ModelConfig& config) {
  const int64_t H = config.hidden_size;
  const int64_t F = config.ffn_hidden_size;
  const int64_t D = config.kv_channels;
  const int64_t A = config.num_attention_heads;
  const int64_t K = config.num_query_groups;
  const int64_t V = config.vocab_size;
  const double std = config.init_method_std;
  // Projections that write to the residual stream start smaller, so that its variance does not grow with depth.
  // Radford et al., GPT-2 (2019), section 2.3; Megatron-LM's scaled_init_method_normal.
  const double residual_std = std / std::sqrt(2.0 * static_cast<double>(config.num_layers));

  add("embedding.weight", {V, H}, Initialisation::normal, std, true);
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const std::string prefix = fmt::format("layers.{}.", layer);
    add(prefix + "attention_norm.weight", {H}, Initialisation::ones, 0, false);
    add(prefix + "qkv.weight", {(A + 2 * K) * D, H}, Initialisation::normal, std, true);
    if (config.add_qkv_bias) add(prefix + "qkv.bias", {(A + 2 * K) * D}, Initialisation::zeros, 0, false);
    if (config.qk_layernorm) {
      add(prefix + "query_norm.weight", {D}, Initialisation::ones, 0, false);
      add(prefix + "key_norm.weight", {D}, Initialisation::ones, 0, false);
    }
    add(prefix + "attention_output.weight", {H, A * D}, Initialisation::normal, residual_std, true);
    add(prefix + "mlp_norm.weight", {H}, Initialisation::ones, 0, false);
    add(prefix + "gate_up.weight", {2 * F, H}, Initialisation::normal, std, true);
    add(prefix + "down.weight", {H, F}, Initialisation::normal, residual_std, true);
  }
  add("final_norm.weight", {H}, Initialisation::ones, 0, false);
  if (config.untie_embeddings_and_output_weights) add("head.weight", {V, H}, Initialisation::normal, std, true);
}

void ParameterTable::add(std::string name, Shape shape, Initialisation initialisation, double std, bool decay) {
  by_name_.emplace(name, parameters_.size());
  parameters_.push_back({std::move(name), shape, initialisation, std, decay, flat_elements_});
  flat_elements_ = round_up(flat_elements_ + shape.numel(), kParameterAlignment);
}

int64_t ParameterTable::parameter_count() const {
  int64_t count = 0;
  for (const Parameter& parameter : parameters_) count += parameter.shape.numel();
  return count;
}

const Parameter& ParameterTable::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  FARSPAN_CHECK(found != by_name_.end(), "parameter table: no parameter {}", name);
  return parameters_[found->second];
}

Tensor ParameterTable::view(const Tensor& flat, const Parameter& parameter) const {
  return flat.slice(0, parameter.offset, parameter.offset + parameter.shape.numel()).reshape(parameter.shape);
}

ModelTensors model_tensors(const ParameterTable& table, const ModelConfig& config, const Tensor& flat) {
  const auto get = [&](const std::string& name) { return table.view(flat, table.find(name)); };
  ModelTensors model;
  model.embedding = get("embedding.weight");
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const std::string prefix = fmt::format("layers.{}.", layer);
    LayerTensors& tensors = model.layers.emplace_back();
    tensors.attention_norm = get(prefix + "attention_norm.weight");
    tensors.qkv = get(prefix + "qkv.weight");
    if (config.add_qkv_bias) tensors.qkv_bias = get(prefix + "qkv.bias");
    if (config.qk_layernorm) {
      tensors.query_norm = get(prefix + "query_norm.weight");
      tensors.key_norm = get(prefix + "key_norm.weight");
    }
    tensors.attention_output = get(prefix + "attention_output.weight");
    tensors.mlp_norm = get(prefix + "mlp_norm.weight");
    tensors.gate_up = get(prefix + "gate_up.weight");
    tensors.down = get(prefix + "down.weight");
  }
  model.final_norm = get("final_norm.weight");
  model.head = config.untie_embeddings_and_output_weights ? get("head.weight") : model.embedding;
  return model;
}

void initialise_parameters(Device& device, const ParameterTable& table, int64_t seed, Tensor flat) {
  if (device.dry()) return;
  for (const Parameter& parameter : table.parameters()) {
    float* values = table.view(flat, parameter).data<float>();
    const int64_t n = parameter.shape.numel();
    switch (parameter.initialisation) {
      case Initialisation::zeros:
        std::fill_n(values, n, 0.0f);
        break;
      case Initialisation::ones:
        std::fill_n(values, n, 1.0f);
        break;
      case Initialisation::normal: {
        const Philox random(static_cast<uint64_t>(seed), parameter.name);
        parallel_for(device, n, 1 << 14, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i)
            values[i] = static_cast<float>(parameter.std * random.normal(static_cast<uint64_t>(i)));
        });
        break;
      }
    }
  }
}

}  // namespace farspan
