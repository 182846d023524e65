// SPDX-License-Identifier: Apache-2.0
// The MLP half of a decoder layer, in tiles of tokens so that the F-wide hidden of all tokens need never exist at once:
//
//   normed  = rms_norm(x)             (t, H)
//   gate_up = normed Wgu^T            (t, 2 F)
//   act     = silu(gate) * up         (t, F)
//   y       = x + dropout(act Wd^T)   (t, H)
//
// Under tensor parallelism F is this rank's part and act Wd^T a partial sum; with sequence parallelism a tile takes its
// tokens from every rank's share, so the two middle lines see token_ranks times as many.
//
// Where ranks share a layer, a tile's tokens are gathered and the sum of the one before it is made while the products
// of another tile run.
//
// Backward is the same list read upwards. A tile's recomputation, where the policy asks for it, happens right before
// its backward and lives no longer. Tiled MLP: Blockwise Parallel Transformer (Liu and Abbeel, 2023); ALST (Snowflake,
// 2025).
#pragma once

#include "model/layer_context.h"
#include "model/parameters.h"

namespace farspan {

struct SavedMlp {
  Buffer normed;       // (t, H)
  Buffer rstd;         // (t) f32
  Buffer normed_amax;  // of each tile, f32; only with fp8 (model/projection.h)
  Buffer gate_up;      // (T, 2 F)
};

// y (t, H) is written; it must not overlap x. `layer` is the layer's number in the model.
void mlp_layer_forward(const LayerContext& context, int64_t layer, const LayerTensors& weights, const MicroBatch& batch,
                       const Tensor& x, SavedMlp& saved, Tensor y);

// d (t, H): on entry the gradient with respect to y, on return with respect to x. Weight gradients (f32) are added to.
void mlp_layer_backward(const LayerContext& context, int64_t layer, const LayerTensors& weights,
                        const LayerGradients& d_weights, const MicroBatch& batch, const Tensor& x, SavedMlp& saved,
                        Tensor d);

}  // namespace farspan
