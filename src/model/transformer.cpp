// SPDX-License-Identifier: Apache-2.0
#include "model/transformer.h"

#include "ops/cross_entropy.h"
#include "ops/elementwise.h"

namespace farspan {
namespace {

Buffer take_stream(const LayerContext& context, std::string_view name, Purpose purpose) {
  return context.take(name, {context.stream_tokens(), context.config.hidden_size}, purpose);
}

// x (t, H) stays in `saved`; returns the layer's output.
Buffer layer_forward(const LayerContext& context, int64_t layer, const LayerTensors& weights, const MicroBatch& batch,
                     Buffer x, SavedLayer& saved) {
  saved.input = std::move(x);
  saved.middle = take_stream(context, "layer.middle", purpose_if(context.keep.attn_proj));
  attention_layer_forward(context, layer, weights, batch, saved.input, saved.attention, saved.middle.tensor());
  Buffer output = take_chunk_input(context);
  mlp_layer_forward(context, layer, weights, batch, saved.middle, saved.mlp, output.tensor());
  if (!context.keep.attn_proj) saved.middle.release();
  return output;
}

// The gradients that are sums over rows and not products.
void clear_vectors(Device& device, const LayerTensors& d_weights) {
  for (const Tensor& gradient :
       {d_weights.attention_norm, d_weights.qkv_bias, d_weights.query_norm, d_weights.key_norm, d_weights.mlp_norm})
    if (gradient.defined()) fill(device, gradient, 0);
}

// d (t, H): gradient with respect to the layer's output on entry, to its input on return.
void layer_backward(const LayerContext& context, int64_t layer, const LayerTensors& weights,
                    const LayerGradients& d_weights, const MicroBatch& batch, SavedLayer& saved, const Tensor& d) {
  if (d_weights.use == Accumulate::no) clear_vectors(context.device, d_weights);
  if (!saved.middle.taken()) {
    saved.middle = take_stream(context, "layer.middle", Purpose::workspace);
    attention_layer_restore(context, layer, weights, batch, saved.input, saved.attention, saved.middle.tensor());
  }
  mlp_layer_backward(context, layer, weights, d_weights, batch, saved.middle, saved.mlp, d);
  saved.middle.release();
  attention_layer_backward(context, layer, weights, d_weights, batch, saved.input, saved.attention, d);
  saved.input.release();
}

void expect_layer(ParameterAccess& access, const ModelChunk& chunk, int64_t layer) {
  if (layer >= chunk.layers.begin && layer < chunk.layers.end) access.expect_weights(access.table().layer_unit(layer));
}

Buffer embed(const LayerContext& context, ParameterAccess& access, const MicroBatch& batch) {
  const OpenWeights embedding(access, access.table().embedding_unit());
  Buffer x = take_chunk_input(context);
  embedding_layer_forward(context, embedding.lone(), batch, x.tensor());
  return x;
}

// Calls body(layer, weights) for the chunk's layers in order; the next layer's weights are on their way meanwhile.
template <typename Body>
void for_each_layer(ParameterAccess& access, const ModelChunk& chunk, Body&& body) {
  for (int64_t layer = chunk.layers.begin; layer < chunk.layers.end; ++layer) {
    const OpenWeights weights(access, access.table().layer_unit(layer));
    expect_layer(access, chunk, layer + 1);
    body(layer, weights.layer(layer));
  }
}

struct HeadWeights {
  OpenWeights final_norm;
  OpenWeights head;
  explicit HeadWeights(ParameterAccess& access)
      : final_norm(access, access.table().final_norm_unit()), head(access, access.table().head_unit()) {}
  HeadTensors tensors() const { return {final_norm.lone(), head.lone()}; }
};

// Forward of the layers with nothing kept.
Buffer run_layers(LayerContext context, ParameterAccess& access, const ModelChunk& chunk, const MicroBatch& batch,
                  Buffer x) {
  context.keep = {};
  expect_layer(access, chunk, chunk.layers.begin);
  if (chunk.first) x = embed(context, access, batch);
  for_each_layer(access, chunk, [&](int64_t layer, const LayerTensors& weights) {
    SavedLayer saved;
    x = layer_forward(context, layer, weights, batch, std::move(x), saved);
  });
  return x;
}

// Loss and gradient of the last chunk's output; what the head read is released.
Buffer head_gradient(const LayerContext& context, ParameterAccess& access, const MicroBatch& batch,
                     double gradient_scale, Buffer& x) {
  const HeadWeights weights(access);
  OpenGradient d_final_norm(access, access.table().final_norm_unit());
  OpenGradient d_head(access, access.table().head_unit());
  Buffer token_loss = context.take_f32("head.token_loss", {context.tokens()}, Purpose::workspace);
  Buffer d_x = take_stream(context, "d_stream", Purpose::workspace);
  head_loss_and_gradient(context, weights.tensors(), {d_final_norm.zeroed_lone(context.device), d_head.lone()},
                         d_head.use(), batch.labels, x, gradient_scale, token_loss.tensor(), d_x.tensor());
  token_loss_sum(context.device, token_loss, context.loss_sum);
  token_loss.release();
  x.release();
  d_final_norm.close();
  d_head.close();
  return d_x;
}

}  // namespace

Buffer take_chunk_input(const LayerContext& context) { return take_stream(context, "layer.input", Purpose::kept); }

Buffer chunk_forward(const LayerContext& context, ParameterAccess& access, const ModelChunk& chunk,
                     const MicroBatch& batch, Buffer input, SavedChunk& saved) {
  saved.layers.resize(static_cast<size_t>(chunk.layers.length()));
  expect_layer(access, chunk, chunk.layers.begin);
  Buffer x = chunk.first ? embed(context, access, batch) : std::move(input);
  for_each_layer(access, chunk, [&](int64_t layer, const LayerTensors& weights) {
    x = layer_forward(context, layer, weights, batch, std::move(x),
                      saved.layers[static_cast<size_t>(layer - chunk.layers.begin)]);
  });
  if (!chunk.last) return x;
  saved.output = std::move(x);
  return {};
}

Buffer chunk_backward(const LayerContext& context, ParameterAccess& access, const ModelChunk& chunk,
                      const MicroBatch& batch, double gradient_scale, SavedChunk& saved, Buffer d_output) {
  Buffer d = std::move(d_output);
  if (chunk.last) d = head_gradient(context, access, batch, gradient_scale, saved.output);
  for (int64_t layer = chunk.layers.end; layer-- > chunk.layers.begin;) {
    const size_t unit = access.table().layer_unit(layer);
    const OpenWeights weights(access, unit);
    expect_layer(access, chunk, layer - 1);
    OpenGradient gradient(access, unit);
    layer_backward(context, layer, weights.layer(layer), gradient.layer(layer), batch,
                   saved.layers[static_cast<size_t>(layer - chunk.layers.begin)], d);
    gradient.close();
  }
  if (!chunk.first) return d;
  OpenGradient d_embedding(access, access.table().embedding_unit());
  embedding_layer_backward(context, batch, d, d_embedding.zeroed_lone(context.device));
  d.release();
  d_embedding.close();
  return {};
}

Buffer chunk_evaluate(const LayerContext& context, ParameterAccess& access, const ModelChunk& chunk,
                      const MicroBatch& batch, Buffer input) {
  Buffer output = run_layers(context, access, chunk, batch, std::move(input));
  if (!chunk.last) return output;
  const HeadWeights weights(access);
  Buffer token_loss = context.take_f32("head.token_loss", {context.tokens()}, Purpose::workspace);
  head_loss(context, weights.tensors(), batch.labels, output, token_loss.tensor());
  token_loss_sum(context.device, token_loss, context.loss_sum);
  return {};
}

void transformer_logits(const LayerContext& context, ParameterAccess& access, const ModelChunk& chunk,
                        const MicroBatch& batch, int64_t token, Tensor logits) {
  const Buffer x = run_layers(context, access, chunk, batch, {});
  const HeadWeights weights(access);
  head_logits(context, weights.tensors(), x.tensor().slice(0, token, token + 1), logits.reshape({1, logits.numel()}));
}

}  // namespace farspan
