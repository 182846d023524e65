// SPDX-License-Identifier: Apache-2.0
#include "model/flops.h"

namespace farspan {

int64_t matmul_parameters(const ModelConfig& config) {
  const int64_t H = config.hidden_size;
  const int64_t D = config.kv_channels;
  const int64_t attention =
      (config.num_attention_heads + 2 * config.num_query_groups) * D * H + H * config.num_attention_heads * D;
  const int64_t mlp = 3 * H * config.ffn_hidden_size;
  return config.num_layers * (attention + mlp) + config.vocab_size * H;
}

double model_flops(const ModelConfig& config, int64_t tokens, int64_t layer_pairs) {
  const double dense = 6.0 * static_cast<double>(matmul_parameters(config)) * static_cast<double>(tokens);
  const double attention =
      12.0 * static_cast<double>(layer_pairs) * static_cast<double>(config.num_attention_heads * config.kv_channels);
  return dense + attention;
}

}  // namespace farspan
