// SPDX-License-Identifier: Apache-2.0
#include "model/head.h"

#include <algorithm>

#include "ops/cross_entropy.h"
#include "ops/gemm.h"
#include "ops/rms_norm.h"

namespace farspan {
namespace {

struct HeadBuffers {
  Buffer normed;    // (t, H)
  Buffer rstd;      // (t) f32
  Buffer logits;    // (t, V) f32
  Buffer d_logits;  // (t, V) bf16; in f32 the gradient takes the place of the logits
};

HeadBuffers take_buffers(const LayerContext& context, const ModelTensors& weights, int64_t tile, bool with_gradient) {
  HeadBuffers buffers;
  buffers.normed = context.take("head.normed", {tile, context.config.hidden_size}, Purpose::workspace);
  buffers.rstd = context.take_f32("head.rstd", {tile}, Purpose::workspace);
  buffers.logits = context.take_f32("head.logits", {tile, weights.head.dim(0)}, Purpose::workspace);
  if (with_gradient && context.dtype != DType::f32)
    buffers.d_logits = context.take("head.d_logits", {tile, weights.head.dim(0)}, Purpose::workspace);
  return buffers;
}

void project(const LayerContext& context, const ModelTensors& weights, const Tensor& x, const Tensor& normed,
             const Tensor& rstd, const Tensor& logits) {
  rms_norm_forward(context.device, x, weights.final_norm, context.config.norm_epsilon, normed, rstd);
  linear_forward(context.device, normed, weights.head, logits);
}

}  // namespace

void head_loss_and_gradient(const LayerContext& context, const ModelTensors& weights, const ModelTensors& d_weights,
                            const Tensor& labels, const Tensor& x, double gradient_scale, Tensor token_loss,
                            Tensor d_x) {
  const int64_t T = context.tokens();
  const int64_t tile = std::min(context.loss_tile, T);
  const HeadBuffers buffers = take_buffers(context, weights, tile, true);
  for (int64_t begin = 0; begin < T; begin += tile) {
    const int64_t end = std::min(begin + tile, T);
    const auto rows = [&](const Tensor& all) { return all.slice(0, 0, end - begin); };
    const Tensor x_tile = x.slice(0, begin, end);
    const Tensor normed = rows(buffers.normed);
    const Tensor rstd = rows(buffers.rstd);
    const Tensor logits = rows(buffers.logits);
    const Tensor d_logits = buffers.d_logits.taken() ? rows(buffers.d_logits) : logits;
    project(context, weights, x_tile, normed, rstd, logits);
    cross_entropy(context.device, logits, labels.slice(0, begin, end), gradient_scale, token_loss.slice(0, begin, end),
                  d_logits);
    linear_backward_weight(context.device, d_logits, normed, d_weights.head);
    const Tensor d_normed = normed;  // its last reader was the line above
    linear_backward_input(context.device, d_logits, weights.head, d_normed, Accumulate::no);
    rms_norm_backward(context.device, d_normed, x_tile, weights.final_norm, rstd, d_x.slice(0, begin, end),
                      Accumulate::no, d_weights.final_norm);
  }
}

void head_loss(const LayerContext& context, const ModelTensors& weights, const Tensor& labels, const Tensor& x,
               Tensor token_loss) {
  const int64_t T = context.tokens();
  const int64_t tile = std::min(context.loss_tile, T);
  const HeadBuffers buffers = take_buffers(context, weights, tile, false);
  for (int64_t begin = 0; begin < T; begin += tile) {
    const int64_t end = std::min(begin + tile, T);
    const auto rows = [&](const Tensor& all) { return all.slice(0, 0, end - begin); };
    project(context, weights, x.slice(0, begin, end), rows(buffers.normed), rows(buffers.rstd), rows(buffers.logits));
    cross_entropy(context.device, rows(buffers.logits), labels.slice(0, begin, end), 1.0,
                  token_loss.slice(0, begin, end), Tensor());
  }
}

void head_logits(const LayerContext& context, const ModelTensors& weights, const Tensor& x, Tensor logits) {
  Buffer normed = context.take("head.normed", x.shape(), Purpose::workspace);
  Buffer rstd = context.take_f32("head.rstd", {x.dim(0)}, Purpose::workspace);
  project(context, weights, x, normed, rstd, logits);
}

}  // namespace farspan
