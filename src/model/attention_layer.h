// SPDX-License-Identifier: Apache-2.0
// The attention half of a decoder layer:
//
//   normed = rms_norm(x)                           (T, H)
//   qkv    = normed Wqkv^T (+ bias)                (T, (A + 2 K) D)
//   q, k   = rope(norm(q)), rope(norm(k))          q/k norm only where the model has it
//   o, lse = context-parallel attention(q, k, v)   (T, A D), (B, A, s)
//   y      = x + dropout(o Wo^T)                   (T, H)
//
// Backward is the same list read upwards. Under tensor parallelism A and K are this rank's heads, o Wo^T is a partial
// sum, and with sequence parallelism x, normed and y hold this rank's t tokens while the lines between see all T.
#pragma once

#include "model/layer_context.h"
#include "model/parameters.h"

namespace farspan {

// What forward leaves for backward; buffers not taken are computed again.
struct SavedAttention {
  Buffer normed;       // (t, H)
  Buffer rstd;         // (t) f32
  Buffer normed_amax;  // (1) f32; only with fp8 (model/projection.h)
  Buffer qkv;          // (T, (A + 2 K) D): rotated, or before the q/k norm where there is one
  Buffer qk;           // (T, (A + K) D): normalised and rotated queries and keys; only with q/k norm
  Buffer query_rstd;   // (T, A) f32; only with q/k norm
  Buffer key_rstd;     // (T, K) f32
  Buffer output;       // (T, A D)
  Buffer lse;          // (B, A, s) f32
};

// y (t, H) is written; it must not overlap x. `layer` is the layer's number in the model.
void attention_layer_forward(const LayerContext& context, int64_t layer, const LayerTensors& weights,
                             const MicroBatch& batch, const Tensor& x, SavedAttention& saved, Tensor y);

// Writes y once more during backward: from the kept attention output, or by attending again where it was dropped.
void attention_layer_restore(const LayerContext& context, int64_t layer, const LayerTensors& weights,
                             const MicroBatch& batch, const Tensor& x, SavedAttention& saved, Tensor y);

// d (t, H): on entry the gradient with respect to y, on return with respect to x. Weight gradients (f32) are added to.
// `saved` is used up.
void attention_layer_backward(const LayerContext& context, int64_t layer, const LayerTensors& weights,
                              const LayerGradients& d_weights, const MicroBatch& batch, const Tensor& x,
                              SavedAttention& saved, Tensor d);

}  // namespace farspan
