// SPDX-License-Identifier: Apache-2.0
// Both ends of the decoder. The embedding turns tokens into the hidden stream; final norm, output projection and
// cross-entropy turn it into a loss, in tiles of tokens: each tile's logits become the tile's loss and gradient at
// once, so the logits of all tokens never exist.
//
//   normed = rms_norm(x)         (t, H)
//   logits = normed Whead^T      (n, v) f32
//   loss   = logsumexp(logits) - logits[label], for tokens that have a label
//
// Under tensor parallelism a rank holds v of the V vocabulary entries. It looks up the tokens it has, the rest of its
// rows are zero and the group's sum is the embedding; the log-sum-exp of its logits and the label's logit, two numbers
// a token, are all that the ranks exchange for the loss. Source: Shoeybi et al., Megatron-LM (2019), section 3.
#pragma once

#include "model/layer_context.h"
#include "model/parameters.h"

namespace farspan {

// x (t, H) is written. embedding (v, H).
void embedding_layer_forward(const LayerContext& context, const Tensor& embedding, const MicroBatch& batch, Tensor x);

// d_x (t, H); d_embedding (v, H) f32 is added to.
void embedding_layer_backward(const LayerContext& context, const MicroBatch& batch, const Tensor& d_x,
                              Tensor d_embedding);

// The weights of the head, or their gradients.
struct HeadTensors {
  Tensor final_norm;  // (H)
  Tensor head;        // (v, H); the embedding itself when tied
};

// Forward and backward. `gradient_scale` multiplies every token's loss gradient (1 / number of targets of the global
// batch). token_loss (T) f32 is written, the same on every tensor-parallel rank, in an order that sequence parallelism
// may change; d_x (t, H) is written; weight gradients (f32) are added to; that of the
// head is overwritten with d_head_use Accumulate::no.
void head_loss_and_gradient(const LayerContext& context, const HeadTensors& weights, const HeadTensors& d_weights,
                            Accumulate d_head_use, const Tensor& labels, const Tensor& x, double gradient_scale,
                            Tensor token_loss, Tensor d_x);

// Forward alone: token_loss (T) f32 is written.
void head_loss(const LayerContext& context, const HeadTensors& weights, const Tensor& labels, const Tensor& x,
               Tensor token_loss);

// logits (n, V) f32 of some rows of x (n, H). Without tensor parallelism.
void head_logits(const LayerContext& context, const HeadTensors& weights, const Tensor& x, Tensor logits);

}  // namespace farspan
