// SPDX-License-Identifier: Apache-2.0
// The MLP half of a decoder layer, in tiles of tokens so that the F-wide hidden of all tokens need never exist at once:
//
//   normed  = rms_norm(x)             (t, H)
//   gate_up = normed Wgu^T            (t, 2 F)
//   act     = silu(gate) * up         (t, F)
//   y       = x + act Wd^T            (t, H)
//
// Backward is the same list read upwards. A tile's recomputation, where the policy asks for it, happens right before
// its backward and lives no longer. Tiled MLP: Blockwise Parallel Transformer (Liu and Abbeel, 2023); ALST (Snowflake,
// 2025).
#pragma once

#include "model/layer_context.h"
#include "model/parameters.h"

namespace farspan {

struct SavedMlp {
  Buffer normed;      // (T, H)
  Buffer rstd;        // (T) f32
  Buffer gate_up;     // (T, 2 F)
  Buffer activation;  // (T, F)
};

// y (T, H) is written; it must not overlap x.
void mlp_layer_forward(const LayerContext& context, const LayerTensors& weights, const Tensor& x, SavedMlp& saved,
                       Tensor y);

// d (T, H): on entry the gradient with respect to y, on return with respect to x. Weight gradients (f32) are added to.
void mlp_layer_backward(const LayerContext& context, const LayerTensors& weights, const LayerTensors& d_weights,
                        const Tensor& x, SavedMlp& saved, Tensor d);

}  // namespace farspan
