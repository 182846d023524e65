// SPDX-License-Identifier: Apache-2.0
#include "train/batch_loader.h"

#include <algorithm>
#include <memory>

#include "device/host_access.h"
#include "ops/rope.h"
#include "parallel/balanced_layout.h"
#include "parallel/deal.h"

namespace farspan {
namespace {

RopeSpec::Scaling scaling_of(RopeScalingType type) {
  switch (type) {
    case RopeScalingType::none:
      return RopeSpec::Scaling::none;
    case RopeScalingType::linear:
      return RopeSpec::Scaling::linear;
    case RopeScalingType::ntk:
      return RopeSpec::Scaling::ntk;
    case RopeScalingType::yarn:
      return RopeSpec::Scaling::yarn;
    case RopeScalingType::llama3:
      return RopeSpec::Scaling::llama3;
  }
  throw InternalError("rope scaling: unknown type");
}

RopeSpec rope_spec(const ModelConfig& model) {
  return {.head_dim = model.kv_channels,
          .base = model.rotary_base,
          .scaling = scaling_of(model.rope_scaling.type),
          .factor = model.rope_scaling.factor,
          .low_freq_factor = model.rope_scaling.low_freq_factor,
          .high_freq_factor = model.rope_scaling.high_freq_factor,
          .original_max_position = static_cast<double>(model.rope_scaling.original_max_position_embeddings),
          .beta_fast = model.rope_scaling.beta_fast,
          .beta_slow = model.rope_scaling.beta_slow};
}

// Row `index` of a (B, s) tensor.
template <typename T>
std::span<T> row_span(const Tensor& all, int64_t index) {
  return {all.data<T>() + index * all.dim(1), static_cast<size_t>(all.dim(1))};
}

// Mask `mask` of (M, B, s): (B, s).
Tensor of_mask(const Tensor& all, int64_t mask) {
  return all.slice(0, mask, mask + 1).reshape({all.dim(1), all.dim(2)});
}

// Here and not in the ops, which on a GPU cannot stop for one.
void check_ids(std::span<const int32_t> ids, int32_t lowest, int64_t vocabulary, std::string_view what) {
  const auto bad = std::find_if(ids.begin(), ids.end(), [&](int32_t id) { return id < lowest || id >= vocabulary; });
  if (bad != ids.end())
    throw DataError(fmt::format("{} {} of a row has id {}; the vocabulary holds ids 0 to {}", what, bad - ids.begin(),
                                *bad, vocabulary - 1));
}

}  // namespace

BatchLoader::BatchLoader(const Config& config, const SequenceLayout& layout, int cp_rank, const Dataset* dataset)
    : config_(config),
      layout_(layout),
      cp_rank_(cp_rank),
      dataset_(dataset),
      inverse_frequencies_(rope_inverse_frequencies(rope_spec(config.model))),
      attention_factor_(rope_attention_factor(rope_spec(config.model))) {
  for (int64_t layer = 0; layer < config.model.num_layers; ++layer) {
    const int64_t size = window_of_layer(config.model, layer);
    auto window = std::find_if(windows_.begin(), windows_.end(), [&](const Window& w) { return w.size == size; });
    if (window == windows_.end()) window = windows_.insert(window, {size, 0});
    ++window->layers;
    mask_of_layer_.push_back(static_cast<size_t>(window - windows_.begin()));
  }
}

IntervalMask BatchLoader::mask_of(const Row& row, size_t mask) const {
  const MaskRule rule = {.causal = true, .window = windows_[mask].size, .prefix = 0};
  if (config_.data.document_mask) return IntervalMask(row.documents, rule);
  if (row.length == 0) return IntervalMask({}, rule);
  return IntervalMask({Span{0, row.length}}, rule);
}

int64_t BatchLoader::visible_pairs_of_layers(const Row& row) const {
  const Span whole = {0, layout_.padded_length()};
  int64_t pairs = 0;
  for (size_t m = 0; m < windows_.size(); ++m)
    pairs += windows_[m].layers * mask_of(row, m).visible_pairs(whole, whole);
  return pairs;
}

void BatchLoader::add_row(const Row& row, MicroBatch& batch) const {
  std::vector<LayerMask> layer_masks;
  for (size_t m = 0; m < windows_.size(); ++m) {
    BatchMask& mask = batch.masks[m];
    mask.rows.push_back(mask_of(row, m));
    mask.row_ids.push_back(row.id);
    layer_masks.push_back({&mask.rows.back(), windows_[m].layers});
  }
  const RowLayout layout = row_layout(layout_, layer_masks);
  for (BatchMask& mask : batch.masks) mask.layouts.push_back(layout);
}

struct BatchLoader::HostBatch {
  HostFilled tokens, labels, positions, lo, hi;
  std::unique_ptr<HostFilled> token_index;

  HostBatch(Device& device, const LoadedBatch& loaded)
      : tokens(device, loaded.tokens),
        labels(device, loaded.labels),
        positions(device, loaded.positions),
        lo(device, loaded.lo),
        hi(device, loaded.hi) {
    if (loaded.token_index.taken()) token_index = std::make_unique<HostFilled>(device, loaded.token_index);
  }
  void send() {
    for (HostFilled* tensor : {&tokens, &labels, &positions, &lo, &hi}) tensor->send();
    if (token_index) token_index->send();
  }
};

LoadedBatch BatchLoader::load(Device& device, Arena& arena, std::span<const Row> rows) const {
  const int64_t B = std::ssize(rows);
  const int64_t s = layout_.local_length();
  const int64_t M = std::ssize(windows_);
  LoadedBatch loaded;
  loaded.tokens = arena.take("batch.tokens", DType::i32, {B, s}, Purpose::batch);
  loaded.labels = arena.take("batch.labels", DType::i32, {B, s}, Purpose::batch);
  loaded.positions = arena.take("batch.positions", DType::i64, {B, s}, Purpose::batch);
  loaded.lo = arena.take("batch.lo", DType::i64, {M, B, s}, Purpose::batch);
  loaded.hi = arena.take("batch.hi", DType::i64, {M, B, s}, Purpose::batch);
  loaded.rope_table =
      arena.take("batch.rope_table", DType::f32, {B * s, 2, config_.model.kv_channels / 2}, Purpose::batch);
  if (config_.model.hidden_dropout > 0)
    loaded.token_index = arena.take("batch.token_index", DType::i64, {B, s}, Purpose::batch);

  MicroBatch& batch = loaded.batch;
  batch.masks.resize(windows_.size());
  batch.mask_of_layer = mask_of_layer_;
  for (int64_t m = 0; m < M; ++m) {
    batch.masks[static_cast<size_t>(m)].lo = of_mask(loaded.lo, m);
    batch.masks[static_cast<size_t>(m)].hi = of_mask(loaded.hi, m);
  }
  for (int64_t b = 0; b < B; ++b) add_row(rows[static_cast<size_t>(b)], batch);
  if (!device.dry()) {
    HostBatch host(device, loaded);
    for (int64_t b = 0; b < B; ++b) fill(rows[static_cast<size_t>(b)], b, loaded, host);
    host.send();
  }
  batch.tokens = loaded.tokens.tensor().reshape({B * s});
  batch.labels = loaded.labels.tensor().reshape({B * s});
  batch.rope_table = loaded.rope_table;
  if (loaded.token_index.taken()) batch.token_index = loaded.token_index.tensor().reshape({B * s});
  rope_table(device, loaded.positions.tensor().reshape({B * s}), inverse_frequencies_, attention_factor_,
             loaded.rope_table.tensor());
  return loaded;
}

void BatchLoader::fill(const Row& row, int64_t index, LoadedBatch& loaded, const HostBatch& host) const {
  const RowLayout& layout = loaded.batch.masks[0].layouts[static_cast<size_t>(index)];
  const std::span<int32_t> tokens = row_span<int32_t>(host.tokens.tensor(), index);
  const std::span<int32_t> labels = row_span<int32_t>(host.labels.tensor(), index);
  deal(layout, cp_rank_, [&](Span span, int64_t local_begin) {
    const size_t begin = static_cast<size_t>(local_begin);
    const size_t count = static_cast<size_t>(span.length());
    if (row.length > 0) {
      dataset_->read(row, span, tokens.subspan(begin, count), labels.subspan(begin, count));
    } else {  // a row that the batch lacks
      std::fill_n(tokens.begin() + local_begin, count, 0);
      std::fill_n(labels.begin() + local_begin, count, kIgnoredLabel);
    }
  });
  loaded.local_targets += std::count_if(labels.begin(), labels.end(), [](int32_t l) { return l != kIgnoredLabel; });
  deal_positions(layout, cp_rank_, row.documents, config_.data.reset_position_ids,
                 row_span<int64_t>(host.positions.tensor(), index));
  for (size_t m = 0; m < loaded.batch.masks.size(); ++m) {
    const IntervalMask& mask = loaded.batch.masks[m].rows[static_cast<size_t>(index)];
    const int64_t of = static_cast<int64_t>(m);
    deal_mask(layout, cp_rank_, mask, row_span<int64_t>(of_mask(host.lo.tensor(), of), index),
              row_span<int64_t>(of_mask(host.hi.tensor(), of), index));
  }
  check_ids(tokens, 0, config_.model.vocab_size, "token");
  check_ids(labels, kIgnoredLabel, config_.model.vocab_size, "label");
  if (host.token_index)
    deal_token_index(layout, cp_rank_, row.id, layout_.seq_length(),
                     row_span<int64_t>(host.token_index->tensor(), index));
}

}  // namespace farspan
