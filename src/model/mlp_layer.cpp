// SPDX-License-Identifier: Apache-2.0
#include "model/mlp_layer.h"

#include <algorithm>

#include "ops/elementwise.h"
#include "ops/gemm.h"
#include "ops/rms_norm.h"
#include "ops/swiglu.h"

namespace farspan {
namespace {

// Views of one tile's tokens.
struct MlpTile {
  Tensor x;           // (t, H)
  Tensor normed;      // (t, H)
  Tensor rstd;        // (t)
  Tensor gate_up;     // (t, 2 F)
  Tensor activation;  // (t, F)
};

// Buffers for what is not kept hold one tile and are used by every tile in turn; kept ones hold all tokens.
class MlpTiles {
 public:
  MlpTiles(const LayerContext& context, SavedMlp& saved) : saved_(saved), keep_(context.keep) {
    const int64_t H = context.config.hidden_size;
    const int64_t F = context.config.ffn_hidden_size;
    const int64_t tile = std::min(context.mlp_tile, context.tokens());
    const auto tokens = [&](bool kept) { return kept ? context.tokens() : tile; };
    const auto take = [&](Buffer& buffer, bool kept, std::string_view name, DType dtype, Shape shape) {
      if (!buffer.taken()) buffer = context.arena.take(name, dtype, shape, purpose_if(kept));
    };
    take(saved.normed, keep_.layernorm, "mlp.normed", context.dtype, {tokens(keep_.layernorm), H});
    take(saved.rstd, keep_.layernorm, "mlp.rstd", DType::f32, {tokens(keep_.layernorm)});
    take(saved.gate_up, keep_.mlp, "mlp.gate_up", context.dtype, {tokens(keep_.mlp), 2 * F});
    take(saved.activation, keep_.mlp, "mlp.activation", context.dtype, {tokens(keep_.mlp), F});
  }

  MlpTile at(const Tensor& x, int64_t begin, int64_t end) const {
    const auto rows = [&](const Tensor& all, bool kept) {
      return kept ? all.slice(0, begin, end) : all.slice(0, 0, end - begin);
    };
    return {x.slice(0, begin, end), rows(saved_.normed, keep_.layernorm), rows(saved_.rstd, keep_.layernorm),
            rows(saved_.gate_up, keep_.mlp), rows(saved_.activation, keep_.mlp)};
  }

  void release_scratch() {
    if (!keep_.mlp) release(saved_.activation, saved_.gate_up);
    if (!keep_.layernorm) release(saved_.rstd, saved_.normed);
  }
  void release_all() {
    release(saved_.activation, saved_.gate_up);
    release(saved_.rstd, saved_.normed);
  }

 private:
  static void release(Buffer& first, Buffer& second) {
    first.release();
    second.release();
  }
  SavedMlp& saved_;
  KeepPolicy keep_;
};

void normalise(const LayerContext& context, const LayerTensors& weights, const MlpTile& tile) {
  rms_norm_forward(context.device, tile.x, weights.mlp_norm, context.config.norm_epsilon, tile.normed, tile.rstd);
}

void expand(const LayerContext& context, const LayerTensors& weights, const MlpTile& tile) {
  linear_forward(context.device, tile.normed, weights.gate_up, tile.gate_up);
  swiglu_forward(context.device, tile.gate_up, tile.activation);
}

}  // namespace

void mlp_layer_forward(const LayerContext& context, const LayerTensors& weights, const Tensor& x, SavedMlp& saved,
                       Tensor y) {
  MlpTiles tiles(context, saved);
  for (int64_t begin = 0; begin < context.tokens(); begin += context.mlp_tile) {
    const int64_t end = std::min(begin + context.mlp_tile, context.tokens());
    const MlpTile tile = tiles.at(x, begin, end);
    const Tensor y_tile = y.slice(0, begin, end);
    normalise(context, weights, tile);
    expand(context, weights, tile);
    linear_forward(context.device, tile.activation, weights.down, y_tile);
    add(context.device, tile.x, y_tile, y_tile);
  }
  tiles.release_scratch();
}

void mlp_layer_backward(const LayerContext& context, const LayerTensors& weights, const LayerTensors& d_weights,
                        const Tensor& x, SavedMlp& saved, Tensor d) {
  MlpTiles tiles(context, saved);
  const int64_t tile_tokens = std::min(context.mlp_tile, context.tokens());
  Buffer d_activation =
      context.take("mlp.d_activation", {tile_tokens, context.config.ffn_hidden_size}, Purpose::workspace);
  for (int64_t begin = 0; begin < context.tokens(); begin += context.mlp_tile) {
    const int64_t end = std::min(begin + context.mlp_tile, context.tokens());
    const MlpTile tile = tiles.at(x, begin, end);
    const Tensor d_tile = d.slice(0, begin, end);
    const Tensor d_act = d_activation.tensor().slice(0, 0, end - begin);
    if (!context.keep.layernorm) normalise(context, weights, tile);
    if (!context.keep.mlp) expand(context, weights, tile);

    linear_backward_weight(context.device, d_tile, tile.activation, d_weights.down);
    linear_backward_input(context.device, d_tile, weights.down, d_act, Accumulate::no);
    const Tensor d_gate_up = tile.gate_up;  // gradients take the place of what they were computed from
    swiglu_backward(context.device, tile.gate_up, d_act, d_gate_up);
    linear_backward_weight(context.device, d_gate_up, tile.normed, d_weights.gate_up);
    const Tensor d_normed = tile.normed;
    linear_backward_input(context.device, d_gate_up, weights.gate_up, d_normed, Accumulate::no);
    rms_norm_backward(context.device, d_normed, tile.x, weights.mlp_norm, tile.rstd, d_tile, Accumulate::yes,
                      d_weights.mlp_norm);
  }
  d_activation.release();
  tiles.release_all();
}

}  // namespace farspan
