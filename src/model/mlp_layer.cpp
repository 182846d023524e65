// SPDX-License-Identifier: Apache-2.0
#include "model/mlp_layer.h"

#include <algorithm>

#include "ops/elementwise.h"
#include "ops/gemm.h"
#include "ops/rms_norm.h"
#include "ops/swiglu.h"

namespace farspan {
namespace {

constexpr std::string_view kOutputDropout = "mlp";

// Views of one tile's tokens: t of this rank's stream, n = token_ranks t where the group's ranks give theirs too.
struct MlpTile {
  int64_t begin = 0;  // tokens of the stream
  int64_t end = 0;
  Tensor x;           // (t, H)
  Tensor normed;      // (t, H)
  Tensor rstd;        // (t)
  Tensor gate_up;     // (n, 2 F)
  Tensor activation;  // (n, F)
};

// Tokens of the stream in one tile.
int64_t tile_tokens(const LayerContext& context) {
  return std::clamp<int64_t>(context.mlp_tile / context.tensor.token_ranks(), 1, context.stream_tokens());
}

// Buffers for what is not kept hold one tile and are used by every tile in turn; kept ones hold all tokens.
class MlpTiles {
 public:
  MlpTiles(const LayerContext& context, const LayerTensors& weights, SavedMlp& saved)
      : saved_(saved), keep_(context.keep), ranks_(context.tensor.token_ranks()) {
    const int64_t H = context.config.hidden_size;
    const int64_t F = weights.down.dim(1);
    const auto tokens = [&](bool kept) { return kept ? context.stream_tokens() : tile_tokens(context); };
    const auto take = [&](Buffer& buffer, bool kept, std::string_view name, DType dtype, Shape shape) {
      if (!buffer.taken()) buffer = context.arena.take(name, dtype, shape, purpose_if(kept));
    };
    take(saved.normed, keep_.layernorm, "mlp.normed", context.dtype, {tokens(keep_.layernorm), H});
    take(saved.rstd, keep_.layernorm, "mlp.rstd", DType::f32, {tokens(keep_.layernorm)});
    take(saved.gate_up, keep_.mlp, "mlp.gate_up", context.dtype, {ranks_ * tokens(keep_.mlp), 2 * F});
    take(saved.activation, keep_.mlp, "mlp.activation", context.dtype, {ranks_ * tokens(keep_.mlp), F});
  }

  MlpTile at(const Tensor& x, int64_t begin, int64_t end) const {
    const auto rows = [&](const Tensor& all, bool kept, int64_t ranks) {
      return kept ? all.slice(0, ranks * begin, ranks * end) : all.slice(0, 0, ranks * (end - begin));
    };
    return {.begin = begin,
            .end = end,
            .x = x.slice(0, begin, end),
            .normed = rows(saved_.normed, keep_.layernorm, 1),
            .rstd = rows(saved_.rstd, keep_.layernorm, 1),
            .gate_up = rows(saved_.gate_up, keep_.mlp, ranks_),
            .activation = rows(saved_.activation, keep_.mlp, ranks_)};
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
  int64_t ranks_;
};

void normalise(const LayerContext& context, const LayerTensors& weights, const MlpTile& tile) {
  rms_norm_forward(context.device, tile.x, weights.mlp_norm, context.config.norm_epsilon, tile.normed, tile.rstd);
}

// normed (n, H): the gathered tokens of the tile.
void expand(const LayerContext& context, const LayerTensors& weights, const MlpTile& tile, const Tensor& normed) {
  linear_forward(context.device, normed, weights.gate_up, tile.gate_up);
  swiglu_forward(context.device, tile.gate_up, tile.activation);
}

// y = x + dropout(act Wd^T) of the tile.
void contract(const LayerContext& context, int64_t layer, const LayerTensors& weights, const MicroBatch& batch,
              const MlpTile& tile, Tensor y) {
  PartialSum projected(context.tensor, context.device, context.arena, "mlp.projected", y);
  linear_forward(context.device, tile.activation, weights.down, projected.target());
  projected.finish();
  if (context.drops_hidden())
    dropout_add(context.device, context.hidden_dropout(layer, kOutputDropout),
                context.stream_index(batch, tile.begin, tile.end), tile.x, y, y);
  else
    add(context.device, tile.x, y, y);
}

}  // namespace

void mlp_layer_forward(const LayerContext& context, int64_t layer, const LayerTensors& weights, const MicroBatch& batch,
                       const Tensor& x, SavedMlp& saved, Tensor y) {
  MlpTiles tiles(context, weights, saved);
  const int64_t step = tile_tokens(context);
  for (int64_t begin = 0; begin < context.stream_tokens(); begin += step) {
    const int64_t end = std::min(begin + step, context.stream_tokens());
    const MlpTile tile = tiles.at(x, begin, end);
    normalise(context, weights, tile);
    GatheredTokens normed(context.tensor, context.arena, "mlp.gathered", tile.normed);
    expand(context, weights, tile, normed.wait());
    contract(context, layer, weights, batch, tile, y.slice(0, begin, end));
  }
  tiles.release_scratch();
}

void mlp_layer_backward(const LayerContext& context, int64_t layer, const LayerTensors& weights,
                        const LayerTensors& d_weights, const MicroBatch& batch, const Tensor& x, SavedMlp& saved,
                        Tensor d) {
  MlpTiles tiles(context, weights, saved);
  const int64_t step = tile_tokens(context);
  const int64_t ranks = context.tensor.token_ranks();
  Buffer d_activation = context.take("mlp.d_activation", {ranks * step, weights.down.dim(1)}, Purpose::workspace);
  Buffer dropped;
  if (context.drops_hidden()) dropped = context.take("mlp.d_dropped", {step, d.dim(1)}, Purpose::workspace);
  for (int64_t begin = 0; begin < context.stream_tokens(); begin += step) {
    const int64_t end = std::min(begin + step, context.stream_tokens());
    const MlpTile tile = tiles.at(x, begin, end);
    const Tensor d_tile = d.slice(0, begin, end);
    const Tensor d_act = d_activation.tensor().slice(0, 0, ranks * (end - begin));
    if (!context.keep.layernorm) normalise(context, weights, tile);
    GatheredTokens normed(context.tensor, context.arena, "mlp.gathered", tile.normed);
    if (!context.keep.mlp) expand(context, weights, tile, normed.wait());

    Tensor d_projected = d_tile;
    if (dropped.taken()) {
      d_projected = dropped.tensor().slice(0, 0, end - begin);
      dropout_backward(context.device, context.hidden_dropout(layer, kOutputDropout),
                       context.stream_index(batch, begin, end), d_tile, d_projected);
    }
    {
      GatheredTokens gathered(context.tensor, context.arena, "mlp.d_projected", d_projected);
      linear_backward_weight(context.device, gathered.wait(), tile.activation, d_weights.down);
      linear_backward_input(context.device, gathered.wait(), weights.down, d_act, Accumulate::no);
    }
    const Tensor d_gate_up = tile.gate_up;  // gradients take the place of what they were computed from
    swiglu_backward(context.device, tile.gate_up, d_act, d_gate_up);
    linear_backward_weight(context.device, d_gate_up, normed.wait(), d_weights.gate_up);
    const Tensor d_normed = tile.normed;
    PartialSum sum(context.tensor, context.device, context.arena, "mlp.d_normed", d_normed);
    linear_backward_input(context.device, d_gate_up, weights.gate_up, sum.target(), Accumulate::no);
    sum.finish();
    rms_norm_backward(context.device, d_normed, tile.x, weights.mlp_norm, tile.rstd, d_tile, Accumulate::yes,
                      d_weights.mlp_norm);
  }
  dropped.release();
  d_activation.release();
  tiles.release_all();
}

}  // namespace farspan
