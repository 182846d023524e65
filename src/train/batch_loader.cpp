// SPDX-License-Identifier: Apache-2.0
#include "train/batch_loader.h"

#include <algorithm>

#include "ops/rope.h"
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

}  // namespace

BatchLoader::BatchLoader(const Config& config, const SequenceLayout& layout, int cp_rank, const Dataset* dataset)
    : config_(config),
      layout_(layout),
      cp_rank_(cp_rank),
      dataset_(dataset),
      inverse_frequencies_(rope_inverse_frequencies(rope_spec(config.model))),
      attention_factor_(rope_attention_factor(rope_spec(config.model))) {}

IntervalMask BatchLoader::mask_of(const Row& row) const {
  const MaskRule rule = {.causal = true, .window = config_.model.window_size, .prefix = 0};
  if (config_.data.document_mask) return IntervalMask(row.documents, rule);
  if (row.length == 0) return IntervalMask({}, rule);
  return IntervalMask({Span{0, row.length}}, rule);
}

LoadedBatch BatchLoader::load(Device& device, Arena& arena, std::span<const Row> rows) const {
  const int64_t B = std::ssize(rows);
  const int64_t s = layout_.local_length();
  LoadedBatch loaded;
  loaded.tokens = arena.take("batch.tokens", DType::i32, {B, s}, Purpose::batch);
  loaded.labels = arena.take("batch.labels", DType::i32, {B, s}, Purpose::batch);
  loaded.positions = arena.take("batch.positions", DType::i64, {B, s}, Purpose::batch);
  loaded.lo = arena.take("batch.lo", DType::i64, {B, s}, Purpose::batch);
  loaded.hi = arena.take("batch.hi", DType::i64, {B, s}, Purpose::batch);
  loaded.rope_table =
      arena.take("batch.rope_table", DType::f32, {B * s, 2, config_.model.kv_channels / 2}, Purpose::batch);
  for (int64_t b = 0; b < B; ++b) {
    loaded.batch.mask.rows.push_back(mask_of(rows[static_cast<size_t>(b)]));
    if (!device.dry()) fill(rows[static_cast<size_t>(b)], b, loaded);
  }
  loaded.batch.tokens = loaded.tokens.tensor().reshape({B * s});
  loaded.batch.labels = loaded.labels.tensor().reshape({B * s});
  loaded.batch.rope_table = loaded.rope_table;
  loaded.batch.mask.lo = loaded.lo;
  loaded.batch.mask.hi = loaded.hi;
  rope_table(device, loaded.positions.tensor().reshape({B * s}), inverse_frequencies_, attention_factor_,
             loaded.rope_table.tensor());
  return loaded;
}

void BatchLoader::fill(const Row& row, int64_t index, LoadedBatch& loaded) const {
  const std::span<int32_t> tokens = row_span<int32_t>(loaded.tokens, index);
  const std::span<int32_t> labels = row_span<int32_t>(loaded.labels, index);
  deal(layout_, cp_rank_, [&](Span span, int64_t local_begin) {
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
  deal_positions(layout_, cp_rank_, row.documents, config_.data.reset_position_ids,
                 row_span<int64_t>(loaded.positions, index));
  deal_mask(layout_, cp_rank_, loaded.batch.mask.rows[static_cast<size_t>(index)], row_span<int64_t>(loaded.lo, index),
            row_span<int64_t>(loaded.hi, index));
}

}  // namespace farspan
