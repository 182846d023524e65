// SPDX-License-Identifier: Apache-2.0
// The decoder: embedding, layers, head. One call runs one micro-batch of one rank; everything it needs lives in the
// arena, and what crosses ranks does so inside attention.
#pragma once

#include "model/layer_context.h"
#include "model/parameters.h"

namespace farspan {

// Forward and backward. Adds to d_weights (f32) the gradient of gradient_scale times the sum of the local tokens'
// losses, and returns that sum, unscaled (0 on the dry device). May be called again to accumulate.
double transformer_train(const LayerContext& context, const ModelTensors& weights, const ModelTensors& d_weights,
                         const MicroBatch& batch, double gradient_scale);

// Forward alone: the sum of the local tokens' losses.
double transformer_evaluate(const LayerContext& context, const ModelTensors& weights, const MicroBatch& batch);

// Logits (V) f32 of the local token `token`.
void transformer_logits(const LayerContext& context, const ModelTensors& weights, const MicroBatch& batch,
                        int64_t token, Tensor logits);

}  // namespace farspan
