// SPDX-License-Identifier: Apache-2.0
#include "model/mlp_layer.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "base/math.h"
#include "model/projection.h"
#include "ops/elementwise.h"
#include "ops/rms_norm.h"
#include "ops/swiglu.h"

namespace farspan {
namespace {

constexpr std::string_view kOutputDropout = "mlp";

// Views of one tile's tokens: t of this rank's stream, n = token_ranks t where the group's ranks give theirs too.
struct MlpTile {
  int64_t begin = 0;  // tokens of the stream
  int64_t end = 0;
  Tensor x;            // (t, H)
  Tensor normed;       // (t, H)
  Tensor rstd;         // (t)
  Tensor normed_amax;  // (1), where it is measured
  Tensor gate_up;      // (n, 2 F)
};

// Tokens of the stream in one tile.
int64_t tile_tokens(const LayerContext& context) {
  return std::clamp<int64_t>(context.mlp_tile / context.tensor.token_ranks(), 1, context.stream_tokens());
}

// Buffers for what is not kept hold one tile and are used by every tile in turn; kept ones hold all tokens. Where tiles
// overlap, the normalised tokens of three of them live at a time and take turns: one is being gathered, one computed,
// and the gradient of one summed.
class MlpTiles {
 public:
  MlpTiles(const LayerContext& context, const LayerTensors& weights, SavedMlp& saved)
      : saved_(saved),
        keep_(context.keep),
        ranks_(context.tensor.token_ranks()),
        length_(tile_tokens(context)),
        count_(ceil_div(context.stream_tokens(), length_)),
        tokens_(context.stream_tokens()),
        overlap_(context.tensor.size() > 1 && count_ > 1) {
    const int64_t H = context.config.hidden_size;
    const int64_t F = weights.down.dim(1);
    const int64_t normed = keep_.layernorm ? tokens_ : (overlap_ ? kSlots : 1) * length_;
    const auto take = [&](Buffer& buffer, bool kept, std::string_view name, DType dtype, Shape shape) {
      if (!buffer.taken()) buffer = context.arena.take(name, dtype, shape, purpose_if(kept));
    };
    take(saved.normed, keep_.layernorm, "mlp.normed", context.dtype, {normed, H});
    take(saved.rstd, keep_.layernorm, "mlp.rstd", DType::f32, {normed});
    if (!saved.normed_amax.taken())
      saved.normed_amax = take_stream_amax(
          context, "mlp.normed_amax", keep_.layernorm ? count_ : (overlap_ ? kSlots : 1), purpose_if(keep_.layernorm));
    take(saved.gate_up, keep_.mlp, "mlp.gate_up", context.dtype, {ranks_ * (keep_.mlp ? tokens_ : length_), 2 * F});
  }

  int64_t count() const { return count_; }
  // Room for a tile's (n, F).
  Buffer take_hidden(const LayerContext& context, const LayerTensors& weights, std::string_view name) const {
    return context.take(name, {ranks_ * length_, weights.down.dim(1)}, Purpose::workspace);
  }
  bool overlap() const { return overlap_; }

  MlpTile at(const Tensor& x, int64_t index) const {
    const int64_t begin = index * length_;
    const int64_t end = std::min(begin + length_, tokens_);
    const int64_t slot = overlap_ ? index % kSlots : 0;
    const auto normed = [&](const Tensor& all) {
      return keep_.layernorm ? all.slice(0, begin, end) : all.slice(0, slot * length_, slot * length_ + end - begin);
    };
    const int64_t hidden = ranks_ * (end - begin);
    const int64_t first_hidden = keep_.mlp ? ranks_ * begin : 0;
    return {.begin = begin,
            .end = end,
            .x = x.slice(0, begin, end),
            .normed = normed(saved_.normed),
            .rstd = normed(saved_.rstd),
            .normed_amax = amax_of(saved_.normed_amax, keep_.layernorm ? index : slot),
            .gate_up = saved_.gate_up.tensor().slice(0, first_hidden, first_hidden + hidden)};
  }

  void release_scratch() {
    if (!keep_.mlp) saved_.gate_up.release();
    if (!keep_.layernorm) release_normed();
  }
  void release_all() {
    saved_.gate_up.release();
    release_normed();
  }

 private:
  static constexpr int64_t kSlots = 3;
  void release_normed() {
    saved_.normed_amax.release();
    saved_.rstd.release();
    saved_.normed.release();
  }
  SavedMlp& saved_;
  KeepPolicy keep_;
  int64_t ranks_;
  int64_t length_;  // tokens of the stream in a tile
  int64_t count_;
  int64_t tokens_;
  bool overlap_;
};

void normalise(const LayerContext& context, const LayerTensors& weights, const MlpTile& tile) {
  rms_norm_forward(context.device, tile.x, weights.mlp_norm, context.config.norm_epsilon, tile.normed, tile.rstd,
                   tile.normed_amax);
}

// The gather of one tile's tokens after the next, begun while the tile before is computed.
class TileGathers {
 public:
  // `prepare(tile)` makes tile.normed where it is not there yet.
  template <typename Prepare>
  GatheredTokens take(const LayerContext& context, const MlpTiles& tiles, const Tensor& x, int64_t index,
                      Prepare&& prepare) {
    const auto start = [&](int64_t which) {
      const MlpTile tile = tiles.at(x, which);
      prepare(tile);
      return GatheredTokens(context.tensor, context.arena, "mlp.gathered", tile.normed);
    };
    if (!tiles.overlap()) return start(index);
    GatheredTokens current = next_ ? std::move(*next_) : start(index);
    next_.reset();
    if (index + 1 < tiles.count()) next_.emplace(start(index + 1));
    return current;
  }

 private:
  std::optional<GatheredTokens> next_;
};

// A sum over the group that a tile waits for, and what is to be done with it.
template <typename Use>
class PendingSum {
 public:
  explicit PendingSum(Use use) : use_(std::move(use)) {}
  // Finishes the sum before, and this one at once where tiles do not overlap.
  void push(PartialSum sum, const MlpTile& tile, bool overlap) {
    sum.start();
    finish();
    sum_ = std::make_unique<PartialSum>(std::move(sum));
    tile_ = tile;
    if (!overlap) finish();
  }
  void finish() {
    if (!sum_) return;
    sum_->finish();
    use_(tile_);
    sum_.reset();
  }

 private:
  Use use_;
  std::unique_ptr<PartialSum> sum_;
  MlpTile tile_;
};

// d_weight of the tile, and the sum over the group that becomes the gradient of what the norm gave, in tile.normed.
PartialSum backward_of_gate_up(const LayerContext& context, const LayerTensors& weights, const Measured& d_gate_up,
                               const Tensor& normed, const MlpTile& tile, const Tensor& d_weight, Accumulate use) {
  ProjectionBackward gate_up(context, d_gate_up);
  gate_up.weight({normed, tile.normed_amax}, d_weight, use);
  PartialSum sum(context.tensor, context.device, context.arena, "mlp.d_normed", tile.normed);
  gate_up.input(weights.measured_gate_up(), sum.target(), Accumulate::no);
  return sum;
}

}  // namespace

void mlp_layer_forward(const LayerContext& context, int64_t layer, const LayerTensors& weights, const MicroBatch& batch,
                       const Tensor& x, SavedMlp& saved, Tensor y) {
  MlpTiles tiles(context, weights, saved);
  TileGathers gathers;
  // y holds act Wd^T; adds x and drops.
  PendingSum outputs([&](const MlpTile& tile) {
    const Tensor y_tile = y.slice(0, tile.begin, tile.end);
    if (context.drops_hidden())
      dropout_add(context.device, context.hidden_dropout(layer, kOutputDropout),
                  context.stream_index(batch, tile.begin, tile.end), tile.x, y_tile, y_tile);
    else
      add(context.device, tile.x, y_tile, y_tile);
  });
  Buffer activations = tiles.take_hidden(context, weights, "mlp.activation");
  Buffer activation_amax = take_amax(context, "mlp.activation_amax", 1, Purpose::workspace);
  for (int64_t index = 0; index < tiles.count(); ++index) {
    const MlpTile tile = tiles.at(x, index);
    const Measured activation{activations.tensor().slice(0, 0, tile.gate_up.dim(0)), amax_of(activation_amax)};
    GatheredTokens normed =
        gathers.take(context, tiles, x, index, [&](const MlpTile& next) { normalise(context, weights, next); });
    project(context, {normed.wait(), tile.normed_amax}, weights.measured_gate_up(), tile.gate_up);
    swiglu_forward(context.device, tile.gate_up, activation.matrix, activation.amax);
    if (context.tensor.size() == 1 && !context.drops_hidden()) {
      project(context, activation, weights.measured_down(), tile.x, y.slice(0, tile.begin, tile.end));
      continue;
    }
    PartialSum projected(context.tensor, context.device, context.arena, "mlp.projected",
                         y.slice(0, tile.begin, tile.end));
    project(context, activation, weights.measured_down(), projected.target());
    outputs.push(std::move(projected), tile, tiles.overlap());
  }
  outputs.finish();
  activation_amax.release();
  activations.release();
  tiles.release_scratch();
}

void mlp_layer_backward(const LayerContext& context, int64_t layer, const LayerTensors& weights,
                        const LayerGradients& d_weights, const MicroBatch& batch, const Tensor& x, SavedMlp& saved,
                        Tensor d) {
  MlpTiles tiles(context, weights, saved);
  TileGathers gathers;
  const int64_t length = tile_tokens(context);
  Buffer d_activation = tiles.take_hidden(context, weights, "mlp.d_activation");
  Buffer amaxes = take_amax(context, "mlp.d_amax", 2, Purpose::workspace);
  Buffer dropped;
  if (context.drops_hidden()) dropped = context.take("mlp.d_dropped", {length, d.dim(1)}, Purpose::workspace);
  // tile.normed has become the gradient of what the norm gave.
  PendingSum inputs([&](const MlpTile& tile) {
    rms_norm_backward(context.device, tile.normed, tile.x, weights.mlp_norm, tile.rstd,
                      d.slice(0, tile.begin, tile.end), Accumulate::yes, d_weights.mlp_norm);
  });
  for (int64_t index = 0; index < tiles.count(); ++index) {
    const MlpTile tile = tiles.at(x, index);
    const Accumulate d_weights_use = index == 0 ? d_weights.use : Accumulate::yes;
    const Tensor d_tile = d.slice(0, tile.begin, tile.end);
    const Tensor d_act = d_activation.tensor().slice(0, 0, tile.gate_up.dim(0));
    GatheredTokens normed = gathers.take(context, tiles, x, index, [&](const MlpTile& next) {
      if (!context.keep.layernorm) normalise(context, weights, next);
    });
    if (!context.keep.mlp)
      project(context, {normed.wait(), tile.normed_amax}, weights.measured_gate_up(), tile.gate_up);

    Tensor d_projected = d_tile;
    if (dropped.taken()) {
      d_projected = dropped.tensor().slice(0, 0, tile.end - tile.begin);
      dropout_backward(context.device, context.hidden_dropout(layer, kOutputDropout),
                       context.stream_index(batch, tile.begin, tile.end), d_tile, d_projected);
    }
    // Gradients take the place of what they were computed from.
    const Measured d_gate_up{tile.gate_up, amax_of(amaxes, 0)};
    {
      GatheredTokens gathered(context.tensor, context.arena, "mlp.d_projected", d_projected);
      ProjectionBackward down(context, {gathered.wait()});
      down.input(weights.measured_down(), d_act, Accumulate::no);
      const Measured activation{d_act, amax_of(amaxes, 1)};  // made once more, in the place of its gradient
      swiglu_backward_and_output(context.device, tile.gate_up, d_act, d_gate_up.matrix, activation.matrix,
                                 d_gate_up.amax, activation.amax);
      down.weight(activation, d_weights.down, d_weights_use);
    }
    PartialSum sum =
        backward_of_gate_up(context, weights, d_gate_up, normed.wait(), tile, d_weights.gate_up, d_weights_use);
    inputs.push(std::move(sum), tile, tiles.overlap());
  }
  inputs.finish();
  dropped.release();
  amaxes.release();
  d_activation.release();
  tiles.release_all();
}

}  // namespace farspan
