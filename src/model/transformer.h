// SPDX-License-Identifier: Apache-2.0
// The decoder as a pipeline sees it: chunks of consecutive layers, the first with the embedding before it, the last
// with the head behind it. One stage without pipeline parallelism is one chunk with both. A call runs one micro-batch
// of one rank; everything it needs lives in the arena. What crosses ranks of the same stage does so inside; what
// crosses stages is the hidden stream that goes in and comes out.
#pragma once

#include "model/attention_layer.h"
#include "model/head.h"
#include "model/mlp_layer.h"
#include "model/parameter_access.h"

namespace farspan {

struct ModelChunk {
  Span layers;
  bool first = true;  // embedding
  bool last = true;   // final norm, head and loss
};

// What one layer's forward leaves for its backward.
struct SavedLayer {
  Buffer input;  // (t, H)
  SavedAttention attention;
  Buffer middle;  // (t, H): the stream between attention and MLP
  SavedMlp mlp;
};

// What a chunk's forward leaves for its backward.
struct SavedChunk {
  std::vector<SavedLayer> layers;
  Buffer output;  // (t, H): what the head reads; last chunk only
};

// The buffer of a hidden stream (t, H) that enters a chunk.
Buffer take_chunk_input(const LayerContext& context);

// `input` is undefined for the first chunk. Returns the stream for the next chunk, or nothing from the last.
Buffer chunk_forward(const LayerContext& context, ParameterAccess& access, const ModelChunk& chunk,
                     const MicroBatch& batch, Buffer input, SavedChunk& saved);

// `d_output` (t, H): gradient with respect to the chunk's output; undefined for the last chunk, whose loss is scaled by
// `gradient_scale`. Adds to the gradients of the chunk's units and, in the last chunk, the sum of the tokens' losses,
// not scaled, to LayerContext::loss_sum. Returns the gradient (t, H) with respect to the chunk's input; nothing from
// the first chunk.
Buffer chunk_backward(const LayerContext& context, ParameterAccess& access, const ModelChunk& chunk,
                      const MicroBatch& batch, double gradient_scale, SavedChunk& saved, Buffer d_output);

// Forward with nothing kept. Returns the stream for the next chunk; the last one adds to LayerContext::loss_sum
// instead.
Buffer chunk_evaluate(const LayerContext& context, ParameterAccess& access, const ModelChunk& chunk,
                      const MicroBatch& batch, Buffer input);

// Logits (V) f32 of the local token `token`, from a chunk that is the whole model, without tensor parallelism.
void transformer_logits(const LayerContext& context, ParameterAccess& access, const ModelChunk& chunk,
                        const MicroBatch& batch, int64_t token, Tensor logits);

}  // namespace farspan
