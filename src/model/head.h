// SPDX-License-Identifier: Apache-2.0
// Final norm, output projection and cross-entropy, in tiles of tokens: each tile's logits are turned into the tile's
// loss and gradient at once, so the logits of all tokens never exist.
//
//   normed = rms_norm(x)         (t, H)
//   logits = normed Whead^T      (t, V) f32
//   loss   = logsumexp(logits) - logits[label], for tokens that have a label
#pragma once

#include "model/layer_context.h"
#include "model/parameters.h"

namespace farspan {

// Forward and backward. `gradient_scale` multiplies every token's loss gradient (1 / number of targets of the global
// batch). token_loss (T) f32 and d_x (T, H) are written, weight gradients (f32) added to.
void head_loss_and_gradient(const LayerContext& context, const ModelTensors& weights, const ModelTensors& d_weights,
                            const Tensor& labels, const Tensor& x, double gradient_scale, Tensor token_loss,
                            Tensor d_x);

// Forward alone: token_loss (T) f32 is written.
void head_loss(const LayerContext& context, const ModelTensors& weights, const Tensor& labels, const Tensor& x,
               Tensor token_loss);

// logits (n, V) f32 of some rows of x (n, H).
void head_logits(const LayerContext& context, const ModelTensors& weights, const Tensor& x, Tensor logits);

}  // namespace farspan
