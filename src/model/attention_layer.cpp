// SPDX-License-Identifier: Apache-2.0
#include "model/attention_layer.h"

#include "model/projection.h"
#include "ops/bias.h"
#include "ops/elementwise.h"
#include "ops/rms_norm.h"
#include "ops/rms_norm_rope.h"

namespace farspan {
namespace {

constexpr std::string_view kOutputDropout = "attention_output";

// Queries, keys and values as heads, cut out of one fused row per token.
struct Heads {
  Tensor query;  // (T, A, D)
  Tensor key;    // (T, K, D)
  Tensor value;  // (T, K, D)
};

Tensor heads_of(const Tensor& fused, int64_t first_head, int64_t heads, int64_t head_dim) {
  return fused.slice(1, first_head * head_dim, (first_head + heads) * head_dim).split_dim(1, heads, head_dim);
}

Heads split_heads(const LayerContext& context, const Tensor& qkv) {
  const int64_t A = context.heads();
  const int64_t K = context.kv_heads();
  const int64_t D = context.config.kv_channels;
  return {heads_of(qkv, 0, A, D), heads_of(qkv, A, K, D), heads_of(qkv, A + K, K, D)};
}

// (T, heads, D) -> (B, s, heads, D)
Tensor by_row(const LayerContext& context, const Tensor& heads) {
  return heads.split_dim(0, context.rows, context.local_length);
}

// Query and key heads, which lie beside each other, as one.
Tensor query_key_heads(const LayerContext& context, const Tensor& fused) {
  return heads_of(fused, 0, context.heads() + context.kv_heads(), context.config.kv_channels);
}

// The heads that attention reads: the fused rows themselves, or the normalised copy of q and k.
Heads attended_heads(const LayerContext& context, const SavedAttention& saved) {
  Heads heads = split_heads(context, saved.qkv);
  if (context.config.qk_layernorm) {
    const int64_t A = context.heads();
    heads.query = heads_of(saved.qk, 0, A, context.config.kv_channels);
    heads.key = heads_of(saved.qk, A, context.kv_heads(), context.config.kv_channels);
  }
  return heads;
}

void normalise(const LayerContext& context, const LayerTensors& weights, const Tensor& x, SavedAttention& saved) {
  if (saved.normed.taken()) return;
  const Purpose purpose = purpose_if(context.keep.layernorm);
  saved.normed = context.take("attention.normed", {context.stream_tokens(), context.config.hidden_size}, purpose);
  saved.rstd = context.take_f32("attention.rstd", {context.stream_tokens()}, purpose);
  saved.normed_amax = take_stream_amax(context, "attention.normed_amax", 1, purpose);
  rms_norm_forward(context.device, x, weights.attention_norm, context.config.norm_epsilon, saved.normed.tensor(),
                   saved.rstd.tensor(), amax_of(saved.normed_amax));
}

void release_normed(SavedAttention& saved) {
  saved.normed_amax.release();
  saved.rstd.release();
  saved.normed.release();
}

// Writes the query and key heads that attention reads, turned by their positions.
void turn_heads(const LayerContext& context, const LayerTensors& weights, const MicroBatch& batch,
                SavedAttention& saved) {
  const ModelConfig& config = context.config;
  if (!config.qk_layernorm) {
    rope_apply(context.device, batch.rope_table, context.rope_style(), RopeDirection::forward,
               query_key_heads(context, saved.qkv));
    return;
  }
  const int64_t T = context.tokens();
  const int64_t A = context.heads();
  const int64_t K = context.kv_heads();
  const Purpose purpose = purpose_if(context.keep.qkv);
  saved.qk = context.take("attention.query_key", {T, (A + K) * config.kv_channels}, purpose);
  saved.query_rstd = context.take_f32("attention.query_rstd", {T, A}, purpose);
  saved.key_rstd = context.take_f32("attention.key_rstd", {T, K}, purpose);
  const Heads raw = split_heads(context, saved.qkv);
  const Heads turned = attended_heads(context, saved);
  rms_norm_rope_forward(context.device, raw.query, weights.query_norm, config.norm_epsilon, batch.rope_table,
                        context.rope_style(), turned.query, saved.query_rstd.tensor());
  rms_norm_rope_forward(context.device, raw.key, weights.key_norm, config.norm_epsilon, batch.rope_table,
                        context.rope_style(), turned.key, saved.key_rstd.tensor());
}

// d_qkv with respect to the turned query and key heads, made one with respect to what the product gave.
void backward_of_turn(const LayerContext& context, const LayerTensors& weights, const LayerGradients& d_weights,
                      const MicroBatch& batch, const SavedAttention& saved, const Tensor& d_qkv) {
  if (!context.config.qk_layernorm) {
    rope_apply(context.device, batch.rope_table, context.rope_style(), RopeDirection::backward,
               query_key_heads(context, d_qkv));
    return;
  }
  const Heads raw = split_heads(context, saved.qkv);
  const Heads d_heads = split_heads(context, d_qkv);
  rms_norm_rope_backward(context.device, d_heads.query, raw.query, weights.query_norm, saved.query_rstd,
                         batch.rope_table, context.rope_style(), d_heads.query, d_weights.query_norm);
  rms_norm_rope_backward(context.device, d_heads.key, raw.key, weights.key_norm, saved.key_rstd, batch.rope_table,
                         context.rope_style(), d_heads.key, d_weights.key_norm);
}

void project_qkv(const LayerContext& context, const LayerTensors& weights, const MicroBatch& batch, const Tensor& x,
                 SavedAttention& saved) {
  if (saved.qkv.taken()) return;
  normalise(context, weights, x, saved);
  saved.qkv =
      context.take("attention.query_key_value", {context.tokens(), weights.qkv.dim(0)}, purpose_if(context.keep.qkv));
  {
    GatheredTokens normed(context.tensor, context.arena, "attention.gathered", saved.normed);
    project(context, {normed.wait(), amax_of(saved.normed_amax)}, weights.measured_qkv(), saved.qkv.tensor());
  }
  if (weights.qkv_bias.defined()) bias_add(context.device, weights.qkv_bias, saved.qkv.tensor());
  turn_heads(context, weights, batch, saved);
}

const ContextAttention& attention_of(const LayerContext& context, int64_t layer) {
  return *context.attention[static_cast<size_t>(layer)];
}

void attend(const LayerContext& context, int64_t layer, const MicroBatch& batch, SavedAttention& saved) {
  const ModelConfig& config = context.config;
  const int64_t A = context.heads();
  const Purpose purpose = purpose_if(context.keep.attention);
  saved.output = context.take("attention.output", {context.tokens(), A * config.kv_channels}, purpose);
  saved.lse = context.take_f32("attention.log_sum_exp", {context.rows, A, context.local_length}, purpose);
  const Heads heads = attended_heads(context, saved);
  attention_of(context, layer)
      .forward(context.device, context.arena, batch.mask(layer), context.attention_dropout(layer),
               by_row(context, heads.query), by_row(context, heads.key), by_row(context, heads.value),
               by_row(context, heads_of(saved.output, 0, A, config.kv_channels)), saved.lse.tensor());
}

void project_output(const LayerContext& context, int64_t layer, const LayerTensors& weights, const MicroBatch& batch,
                    const Tensor& x, const SavedAttention& saved, Tensor y) {
  if (context.tensor.size() == 1 && !context.drops_hidden())
    return project(context, {saved.output}, weights.measured_attention_output(), x, y);
  PartialSum projected(context.tensor, context.device, context.arena, "attention.projected", y);
  project(context, {saved.output}, weights.measured_attention_output(), projected.target());
  projected.finish();
  if (context.drops_hidden())
    dropout_add(context.device, context.hidden_dropout(layer, kOutputDropout),
                context.stream_index(batch, 0, context.stream_tokens()), x, y, y);
  else
    add(context.device, x, y, y);
}

// d (t, H) with respect to y -> d_output (T, A D) with respect to o.
void backward_of_output(const LayerContext& context, int64_t layer, const LayerTensors& weights,
                        const LayerGradients& d_weights, const MicroBatch& batch, const SavedAttention& saved,
                        const Tensor& d, Tensor d_output) {
  Buffer dropped;
  if (context.drops_hidden()) {
    dropped = context.take("attention.d_dropped", d.shape(), Purpose::workspace);
    dropout_backward(context.device, context.hidden_dropout(layer, kOutputDropout),
                     context.stream_index(batch, 0, context.stream_tokens()), d, dropped.tensor());
  }
  GatheredTokens d_projected(context.tensor, context.arena, "attention.d_projected",
                             dropped.taken() ? dropped.tensor() : d);
  ProjectionBackward projection(context, {d_projected.wait()});
  projection.weight({saved.output}, d_weights.attention_output, d_weights.use);
  projection.input(weights.measured_attention_output(), d_output, Accumulate::no);
}

// `normed`: what the norm gave, which its gradient takes the place of.
void backward_of_qkv(const LayerContext& context, const LayerTensors& weights, const LayerGradients& d_weights,
                     const Tensor& d_qkv, const Measured& normed) {
  ProjectionBackward projection(context, {d_qkv});
  {
    GatheredTokens gathered(context.tensor, context.arena, "attention.gathered", normed.matrix);
    projection.weight({gathered.wait(), normed.amax}, d_weights.qkv, d_weights.use);
  }
  PartialSum sum(context.tensor, context.device, context.arena, "attention.d_normed", normed.matrix);
  projection.input(weights.measured_qkv(), sum.target(), Accumulate::no);
  sum.finish();
}

void release_heads(SavedAttention& saved) {
  saved.key_rstd.release();
  saved.query_rstd.release();
  saved.qk.release();
  saved.qkv.release();
}

}  // namespace

void attention_layer_forward(const LayerContext& context, int64_t layer, const LayerTensors& weights,
                             const MicroBatch& batch, const Tensor& x, SavedAttention& saved, Tensor y) {
  project_qkv(context, weights, batch, x, saved);
  if (!context.keep.layernorm) release_normed(saved);
  attend(context, layer, batch, saved);
  if (!context.keep.qkv) release_heads(saved);
  project_output(context, layer, weights, batch, x, saved, y);
  if (!context.keep.attention) {
    saved.lse.release();
    saved.output.release();
  }
}

void attention_layer_restore(const LayerContext& context, int64_t layer, const LayerTensors& weights,
                             const MicroBatch& batch, const Tensor& x, SavedAttention& saved, Tensor y) {
  if (!saved.output.taken()) {
    project_qkv(context, weights, batch, x, saved);
    attend(context, layer, batch, saved);
  }
  project_output(context, layer, weights, batch, x, saved, y);
}

void attention_layer_backward(const LayerContext& context, int64_t layer, const LayerTensors& weights,
                              const LayerGradients& d_weights, const MicroBatch& batch, const Tensor& x,
                              SavedAttention& saved, Tensor d) {
  const ModelConfig& config = context.config;
  const int64_t A = context.heads();
  project_qkv(context, weights, batch, x, saved);
  if (!context.keep.layernorm) release_normed(saved);  // made again after attention, whose memory is the most there is
  Buffer d_qkv =
      context.take("attention.d_query_key_value", {context.tokens(), weights.qkv.dim(0)}, Purpose::workspace);
  const Heads d_heads = split_heads(context, d_qkv);
  {
    Buffer d_output =
        context.take("attention.d_output", {context.tokens(), A * config.kv_channels}, Purpose::workspace);
    backward_of_output(context, layer, weights, d_weights, batch, saved, d, d_output.tensor());
    const auto rows = [&](const Tensor& fused) { return by_row(context, heads_of(fused, 0, A, config.kv_channels)); };
    const Heads heads = attended_heads(context, saved);
    attention_of(context, layer)
        .backward(context.device, context.arena, batch.mask(layer), context.attention_dropout(layer),
                  by_row(context, heads.query), by_row(context, heads.key), by_row(context, heads.value),
                  rows(saved.output), saved.lse, rows(d_output), by_row(context, d_heads.query),
                  by_row(context, d_heads.key), by_row(context, d_heads.value));
  }
  saved.lse.release();
  saved.output.release();
  backward_of_turn(context, weights, d_weights, batch, saved, d_qkv);
  release_heads(saved);
  if (weights.qkv_bias.defined()) bias_backward(context.device, d_qkv, d_weights.qkv_bias);
  normalise(context, weights, x, saved);
  backward_of_qkv(context, weights, d_weights, d_qkv, {saved.normed, amax_of(saved.normed_amax)});
  const Tensor d_normed = saved.normed;
  rms_norm_backward(context.device, d_normed, x, weights.attention_norm, saved.rstd, d, Accumulate::yes,
                    d_weights.attention_norm);
  release_normed(saved);
}

}  // namespace farspan
