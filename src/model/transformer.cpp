// SPDX-License-Identifier: Apache-2.0
#include "model/transformer.h"

#include <vector>

#include "model/attention_layer.h"
#include "model/head.h"
#include "model/mlp_layer.h"
#include "ops/cross_entropy.h"
#include "ops/embedding.h"

namespace farspan {
namespace {

// What one layer's forward leaves for its backward.
struct SavedLayer {
  Buffer input;  // (T, H)
  SavedAttention attention;
  Buffer middle;  // (T, H): the stream between attention and MLP
  SavedMlp mlp;
};

Buffer take_stream(const LayerContext& context, std::string_view name, Purpose purpose) {
  return context.take(name, {context.tokens(), context.config.hidden_size}, purpose);
}

// x (T, H) stays in `saved`; returns the layer's output.
Buffer layer_forward(const LayerContext& context, const LayerTensors& weights, const MicroBatch& batch, Buffer x,
                     SavedLayer& saved) {
  saved.input = std::move(x);
  saved.middle = take_stream(context, "layer.middle", purpose_if(context.keep.attn_proj));
  attention_layer_forward(context, weights, batch, saved.input, saved.attention, saved.middle.tensor());
  Buffer output = take_stream(context, "layer.input", Purpose::kept);
  mlp_layer_forward(context, weights, saved.middle, saved.mlp, output.tensor());
  if (!context.keep.attn_proj) saved.middle.release();
  return output;
}

// d (T, H): gradient with respect to the layer's output on entry, to its input on return.
void layer_backward(const LayerContext& context, const LayerTensors& weights, const LayerTensors& d_weights,
                    const MicroBatch& batch, SavedLayer& saved, const Tensor& d) {
  if (!saved.middle.taken()) {
    saved.middle = take_stream(context, "layer.middle", Purpose::workspace);
    attention_layer_restore(context, weights, batch, saved.input, saved.attention, saved.middle.tensor());
  }
  mlp_layer_backward(context, weights, d_weights, saved.middle, saved.mlp, d);
  saved.middle.release();
  attention_layer_backward(context, weights, d_weights, batch, saved.input, saved.attention, d);
  saved.input.release();
}

Buffer embed(const LayerContext& context, const ModelTensors& weights, const MicroBatch& batch) {
  Buffer x = take_stream(context, "layer.input", Purpose::kept);
  embedding_forward(context.device, batch.tokens, weights.embedding, x.tensor());
  return x;
}

// Forward with nothing kept beyond the running layer.
Buffer run_layers(LayerContext context, const ModelTensors& weights, const MicroBatch& batch) {
  context.keep = {};
  Buffer x = embed(context, weights, batch);
  for (const LayerTensors& layer : weights.layers) {
    SavedLayer saved;
    x = layer_forward(context, layer, batch, std::move(x), saved);
  }
  return x;
}

}  // namespace

double transformer_train(const LayerContext& context, const ModelTensors& weights, const ModelTensors& d_weights,
                         const MicroBatch& batch, double gradient_scale) {
  std::vector<SavedLayer> saved(weights.layers.size());
  Buffer x = embed(context, weights, batch);
  for (size_t layer = 0; layer < saved.size(); ++layer)
    x = layer_forward(context, weights.layers[layer], batch, std::move(x), saved[layer]);

  Buffer token_loss = context.take_f32("head.token_loss", {context.tokens()}, Purpose::workspace);
  Buffer d = take_stream(context, "d_stream", Purpose::workspace);
  head_loss_and_gradient(context, weights, d_weights, batch.labels, x, gradient_scale, token_loss.tensor(), d.tensor());
  const double loss = token_loss_sum(context.device, token_loss);
  token_loss.release();
  x.release();

  for (size_t layer = saved.size(); layer-- > 0;)
    layer_backward(context, weights.layers[layer], d_weights.layers[layer], batch, saved[layer], d);
  embedding_backward(context.device, batch.tokens, d, d_weights.embedding);
  return loss;
}

double transformer_evaluate(const LayerContext& context, const ModelTensors& weights, const MicroBatch& batch) {
  const Buffer x = run_layers(context, weights, batch);
  Buffer token_loss = context.take_f32("head.token_loss", {context.tokens()}, Purpose::workspace);
  head_loss(context, weights, batch.labels, x, token_loss.tensor());
  return token_loss_sum(context.device, token_loss);
}

void transformer_logits(const LayerContext& context, const ModelTensors& weights, const MicroBatch& batch,
                        int64_t token, Tensor logits) {
  const Buffer x = run_layers(context, weights, batch);
  head_logits(context, weights, x.tensor().slice(0, token, token + 1), logits.reshape({1, logits.numel()}));
}

}  // namespace farspan
