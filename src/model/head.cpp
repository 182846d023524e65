// SPDX-License-Identifier: Apache-2.0
#include "model/head.h"

#include <algorithm>

#include "ops/cross_entropy.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/gemm.h"
#include "ops/rms_norm.h"

namespace farspan {
namespace {

constexpr std::string_view kEmbeddingDropout = "embedding";

VocabularyPart vocabulary_part(const LayerContext& context) {
  const Span part = vocabulary_of(context.config, context.tensor.size(), context.tensor.rank());
  return {.first_id = part.begin, .vocabulary = context.config.vocab_size};
}

// Tokens of the stream in one tile of the head.
int64_t tile_tokens(const LayerContext& context) {
  return std::clamp<int64_t>(context.loss_tile / context.tensor.token_ranks(), 1, context.stream_tokens());
}

struct HeadBuffers {
  Buffer normed;      // (t, H)
  Buffer rstd;        // (t) f32
  Buffer logits;      // (n, v) f32
  Buffer d_logits;    // (n, v) bf16; in f32 the gradient takes the place of the logits
  Buffer labels;      // (n) i32: of a tile's tokens, where sequence parallelism picks them from every rank's share
  Buffer statistics;  // (tp, 2, n) f32, tensor-parallel only
  Buffer own;         // (2, n) f32
  Buffer lse;         // (n) f32
};

HeadBuffers take_buffers(const LayerContext& context, const HeadTensors& weights, bool with_gradient) {
  const int64_t tile = tile_tokens(context);
  const int64_t n = tile * context.tensor.token_ranks();
  const int64_t v = weights.head.dim(0);
  HeadBuffers buffers;
  buffers.normed = context.take("head.normed", {tile, context.config.hidden_size}, Purpose::workspace);
  buffers.rstd = context.take_f32("head.rstd", {tile}, Purpose::workspace);
  buffers.logits = context.take_f32("head.logits", {n, v}, Purpose::workspace);
  if (with_gradient && context.dtype != DType::f32)
    buffers.d_logits = context.take("head.d_logits", {n, v}, Purpose::workspace);
  if (context.tensor.size() == 1) return buffers;
  if (context.tensor.sequence_parallel())
    buffers.labels = context.arena.take("head.labels", DType::i32, {n}, Purpose::workspace);
  buffers.statistics = context.take_f32("head.statistics", {context.tensor.size(), 2, n}, Purpose::communication);
  buffers.own = context.take_f32("head.own_statistics", {2, n}, Purpose::communication);
  buffers.lse = context.take_f32("head.log_sum_exp", {n}, Purpose::workspace);
  return buffers;
}

// One tile: t tokens of this rank's stream, n of all ranks' under sequence parallelism.
struct HeadTile {
  Tensor x;         // (t, H)
  Tensor normed;    // (t, H)
  Tensor rstd;      // (t)
  Tensor logits;    // (n, v)
  Tensor d_logits;  // (n, v)
  Tensor labels;    // (n)
  Tensor loss;      // (n)
};

// Labels of the tile's tokens in the order in which the ranks' shares are gathered.
Tensor tile_labels(const LayerContext& context, const HeadBuffers& buffers, const Tensor& labels, int64_t begin,
                   int64_t end) {
  if (!buffers.labels.taken()) return labels.slice(0, begin, end);
  const Tensor shares = labels.reshape({context.tensor.token_ranks(), context.stream_tokens()}).slice(1, begin, end);
  const Tensor picked = buffers.labels.tensor().slice(0, 0, shares.numel());
  cast(context.device, shares, picked.reshape(shares.shape()));
  return picked;
}

HeadTile tile_at(const LayerContext& context, const HeadBuffers& buffers, const Tensor& labels, const Tensor& x,
                 const Tensor& token_loss, int64_t begin, int64_t end) {
  const int64_t ranks = context.tensor.token_ranks();
  const auto rows = [&](const Tensor& all, int64_t count) { return all.slice(0, 0, count); };
  HeadTile tile;
  tile.x = x.slice(0, begin, end);
  tile.normed = rows(buffers.normed, end - begin);
  tile.rstd = rows(buffers.rstd, end - begin);
  tile.logits = rows(buffers.logits, ranks * (end - begin));
  tile.d_logits = buffers.d_logits.taken() ? rows(buffers.d_logits, ranks * (end - begin)) : tile.logits;
  tile.labels = tile_labels(context, buffers, labels, begin, end);
  tile.loss = token_loss.slice(0, ranks * begin, ranks * end);
  return tile;
}

void normalise(const LayerContext& context, const HeadTensors& weights, const HeadTile& tile) {
  rms_norm_forward(context.device, tile.x, weights.final_norm, context.config.norm_epsilon, tile.normed, tile.rstd);
}

// The tile's loss and, where `scale` is given, the gradient of its logits.
void loss_of_tile(const LayerContext& context, const HeadBuffers& buffers, const HeadTile& tile, const double* scale) {
  Device& device = context.device;
  const Tensor d_logits = scale == nullptr ? Tensor() : tile.d_logits;
  if (context.tensor.size() == 1) {
    cross_entropy(device, tile.logits, tile.labels, scale == nullptr ? 1.0 : *scale, tile.loss, d_logits);
    return;
  }
  const int64_t n = tile.labels.dim(0);
  const VocabularyPart part = vocabulary_part(context);
  const auto first = [](const Tensor& buffer, Shape shape) {
    return buffer.reshape({buffer.numel()}).slice(0, 0, shape.numel()).reshape(shape);
  };
  const Tensor own = first(buffers.own, {2, n});
  const Tensor all = first(buffers.statistics, {context.tensor.size(), 2, n});
  const Tensor lse = buffers.lse.tensor().slice(0, 0, n);
  vocabulary_statistics(device, tile.logits, tile.labels, part, own);
  context.tensor.group().all_gather(own, all, "head.statistics").wait();
  combine_statistics(device, all, tile.labels, lse, tile.loss);
  if (scale != nullptr) vocabulary_gradient(device, tile.logits, tile.labels, part, lse, *scale, d_logits);
}

}  // namespace

void embedding_layer_forward(const LayerContext& context, const Tensor& embedding, const MicroBatch& batch, Tensor x) {
  if (context.tensor.size() == 1) {
    embedding_forward(context.device, batch.tokens, embedding, x);
  } else {
    PartialSum sum(context.tensor, context.device, context.arena, "embedding.partial", x);
    embedding_forward(context.device, batch.tokens, embedding, vocabulary_part(context), sum.target());
    sum.finish();
  }
  if (context.drops_hidden())
    dropout_add(context.device, context.hidden_dropout(0, kEmbeddingDropout),
                context.stream_index(batch, 0, context.stream_tokens()), Tensor(), x, x);
}

void embedding_layer_backward(const LayerContext& context, const MicroBatch& batch, const Tensor& d_x,
                              Tensor d_embedding) {
  Buffer dropped;
  if (context.drops_hidden()) {
    dropped = context.take("embedding.d_dropped", d_x.shape(), Purpose::workspace);
    dropout_backward(context.device, context.hidden_dropout(0, kEmbeddingDropout),
                     context.stream_index(batch, 0, context.stream_tokens()), d_x, dropped.tensor());
  }
  GatheredTokens d_tokens(context.tensor, context.arena, "embedding.gathered",
                          dropped.taken() ? dropped.tensor() : d_x);
  if (context.tensor.size() == 1)
    embedding_backward(context.device, batch.tokens, d_tokens.wait(), d_embedding);
  else
    embedding_backward(context.device, batch.tokens, d_tokens.wait(), vocabulary_part(context), d_embedding);
}

void head_loss_and_gradient(const LayerContext& context, const HeadTensors& weights, const HeadTensors& d_weights,
                            Accumulate d_head_use, const Tensor& labels, const Tensor& x, double gradient_scale,
                            Tensor token_loss, Tensor d_x) {
  const HeadBuffers buffers = take_buffers(context, weights, true);
  const int64_t step = tile_tokens(context);
  for (int64_t begin = 0; begin < context.stream_tokens(); begin += step) {
    const int64_t end = std::min(begin + step, context.stream_tokens());
    const HeadTile tile = tile_at(context, buffers, labels, x, token_loss, begin, end);
    normalise(context, weights, tile);
    {
      GatheredTokens normed(context.tensor, context.arena, "head.gathered", tile.normed);
      linear_forward(context.device, normed.wait(), weights.head, tile.logits);
      loss_of_tile(context, buffers, tile, &gradient_scale);
      linear_backward_weight(context.device, tile.d_logits, normed.wait(), d_weights.head,
                             begin == 0 ? d_head_use : Accumulate::yes);
    }
    const Tensor d_normed = tile.normed;  // its last reader was the line above
    PartialSum sum(context.tensor, context.device, context.arena, "head.d_normed", d_normed);
    linear_backward_input(context.device, tile.d_logits, weights.head, sum.target(), Accumulate::no);
    sum.finish();
    rms_norm_backward(context.device, d_normed, tile.x, weights.final_norm, tile.rstd, d_x.slice(0, begin, end),
                      Accumulate::no, d_weights.final_norm);
  }
}

void head_loss(const LayerContext& context, const HeadTensors& weights, const Tensor& labels, const Tensor& x,
               Tensor token_loss) {
  const HeadBuffers buffers = take_buffers(context, weights, false);
  const int64_t step = tile_tokens(context);
  for (int64_t begin = 0; begin < context.stream_tokens(); begin += step) {
    const int64_t end = std::min(begin + step, context.stream_tokens());
    const HeadTile tile = tile_at(context, buffers, labels, x, token_loss, begin, end);
    normalise(context, weights, tile);
    GatheredTokens normed(context.tensor, context.arena, "head.gathered", tile.normed);
    linear_forward(context.device, normed.wait(), weights.head, tile.logits);
    loss_of_tile(context, buffers, tile, nullptr);
  }
}

void head_logits(const LayerContext& context, const HeadTensors& weights, const Tensor& x, Tensor logits) {
  Buffer normed = context.take("head.normed", x.shape(), Purpose::workspace);
  Buffer rstd = context.take_f32("head.rstd", {x.dim(0)}, Purpose::workspace);
  rms_norm_forward(context.device, x, weights.final_norm, context.config.norm_epsilon, normed, rstd);
  linear_forward(context.device, normed, weights.head, logits);
}

}  // namespace farspan
