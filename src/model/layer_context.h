// SPDX-License-Identifier: Apache-2.0
// What every layer of one rank shares: where it runs, how it is sized, and the rows it is working on.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "config/config.h"
#include "memory/arena.h"
#include "model/keep_policy.h"
#include "model/parameters.h"
#include "ops/dropout.h"
#include "ops/rope.h"
#include "parallel/context/context_attention.h"
#include "parallel/tensor/tensor_parallel.h"

namespace farspan {

// The local tokens of one micro-batch's rows, on the device. B rows of s tokens each; T = B s.
struct MicroBatch {
  Tensor tokens;                      // (T) i32
  Tensor labels;                      // (T) i32, kIgnoredLabel where there is no target
  Tensor rope_table;                  // (T, 2, D / 2) f32: cosines, sines
  Tensor token_index;                 // (T) i64: number of the token in the data; undefined without hidden dropout
  std::vector<BatchMask> masks;       // one per distinct window of the model
  std::vector<size_t> mask_of_layer;  // (L): index into masks
  const BatchMask& mask(int64_t layer) const { return masks[mask_of_layer[static_cast<size_t>(layer)]]; }
};

struct LayerContext {
  Device& device;
  Arena& arena;
  const ModelConfig& config;
  const TensorParallel& tensor;
  std::span<const ContextAttention* const> attention;  // (L)
  KeepPolicy keep;
  DType dtype = DType::f32;  // of activations and compute weights
  bool fp8 = false;          // the layers' products are of operands in 8 bits (model/projection.h)
  int64_t rows = 1;          // B
  int64_t local_length = 0;  // s
  int64_t mlp_tile = 0;      // tokens
  int64_t loss_tile = 0;     // tokens
  Tensor loss_sum;           // (1) f64, to which the head adds its tokens' losses
  bool dropout = false;      // training; evaluation drops nothing
  int64_t seed = 0;
  int64_t step = 0;

  int64_t tokens() const { return rows * local_length; }  // T
  // t: the tokens of the hidden stream on this rank; T, or T / tp under sequence parallelism.
  int64_t stream_tokens() const { return tokens() / tensor.token_ranks(); }
  int64_t heads() const { return query_heads().length(); }         // a
  int64_t kv_heads() const { return key_value_heads().length(); }  // k
  Span query_heads() const { return query_heads_of(config, tensor.size(), tensor.rank()); }
  Span key_value_heads() const { return key_value_heads_of(config, tensor.size(), tensor.rank()); }
  RopeStyle rope_style() const { return config.rotary_interleaved ? RopeStyle::interleaved : RopeStyle::half_split; }

  bool drops_hidden() const { return dropout && config.hidden_dropout > 0; }
  Dropout hidden_dropout(int64_t layer, std::string_view place) const {
    return {.probability = config.hidden_dropout, .key = dropout_key(seed, step, layer, place)};
  }
  AttentionDropout attention_dropout(int64_t layer) const {
    if (!dropout || config.attention_dropout == 0) return {};
    return {.probability = config.attention_dropout, .key = dropout_key(seed, step, layer, "attention")};
  }
  // token_index of the hidden stream's tokens [begin, end) on this rank.
  Tensor stream_index(const MicroBatch& batch, int64_t begin, int64_t end) const {
    const int64_t first = tensor.sequence_parallel() ? tensor.rank() * stream_tokens() : 0;
    return batch.token_index.slice(0, first + begin, first + end);
  }

  Buffer take(std::string_view name, const Shape& shape, Purpose purpose) const {
    return arena.take(name, dtype, shape, purpose);
  }
  Buffer take_f32(std::string_view name, const Shape& shape, Purpose purpose) const {
    return arena.take(name, DType::f32, shape, purpose);
  }
};

inline Purpose purpose_if(bool kept) { return kept ? Purpose::kept : Purpose::workspace; }

}  // namespace farspan
