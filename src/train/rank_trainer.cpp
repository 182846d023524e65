// SPDX-License-Identifier: Apache-2.0
#include "train/rank_trainer.h"

#include <algorithm>
#include <array>

#include "model/transformer.h"
#include "ops/elementwise.h"
#include "optim/schedule.h"

namespace farspan {
namespace {

DType compute_dtype(Precision precision) { return precision == Precision::fp32 ? DType::f32 : DType::bf16; }

ContextAttentionShape attention_shape(const ModelConfig& model) {
  return {.heads = model.num_attention_heads,
          .kv_heads = model.num_query_groups,
          .head_dim = model.kv_channels,
          .scale = static_cast<float>(model.softmax_scale)};
}

WeightState take_weights(const Config& config, const ParameterTable& table, Arena& arena, RunKind kind) {
  if (kind == RunKind::train)
    return take_weight_state(arena, table, config.training.precision, config.optimizer.optimizer);
  return take_inference_weights(arena, table, config.training.precision);
}

}  // namespace

RankTrainer::RankTrainer(const Config& config, const ResolvedSizes& sizes, RankContext& context, const Dataset* dataset,
                         RunKind kind)
    : config_(config),
      sizes_(sizes),
      context_(context),
      dataset_(dataset),
      table_(config.model),
      state_(take_weights(config, table_, *context.arena, kind)),
      weights_(model_tensors(table_, config.model, state_.compute_weights())),
      layout_(config.parallel.cp_layout, config.data.seq_length,
              static_cast<int>(config.parallel.context_parallel_size)),
      attention_(context.group(Dimension::cp), layout_, attention_shape(config.model),
                 choose_cp_comm_type(config.parallel.cp_comm_type, layout_, attention_shape(config.model),
                                     compute_dtype(config.training.precision))),
      layers_{.device = *context.device,
              .arena = *context.arena,
              .config = config.model,
              .attention = attention_,
              .keep = keep_policy(config.memory),
              .dtype = compute_dtype(config.training.precision),
              .rows = config.training.micro_batch_size,
              .local_length = layout_.local_length(),
              .mlp_tile = config.memory.mlp_tile_tokens,
              .loss_tile = config.memory.loss_tile_tokens},
      loader_(config, layout_, context.coordinate(Dimension::cp), dataset) {
  if (kind == RunKind::train) gradients_ = model_tensors(table_, config.model, state_.gradients);
  if (dataset != nullptr && kind == RunKind::train)
    sampler_.emplace(dataset->rows(Split::train), config.training.seed, true);
}

// One document as long as the row: the mask with the most visible pairs.
std::vector<Row> RankTrainer::longest_rows() const {
  const int64_t S = config_.data.seq_length;
  const Row row = {.id = 0, .length = S, .documents = {Span{0, S}}, .targets = S - 1};
  return std::vector<Row>(static_cast<size_t>(config_.training.micro_batch_size), row);
}

void RankTrainer::record_micro_batch() {
  int64_t targets = 0;
  train_micro_batch(longest_rows(), 1.0, &targets);
}

void RankTrainer::record_update() {
  fill(*context_.device, state_.gradients.tensor(), 0);
  context_.group(Dimension::dp_cp).all_reduce(state_.gradients, "gradients").wait();
  update_weights(*context_.device, config_.optimizer, table_, 1, 0, state_);
}

void RankTrainer::record_evaluation() {
  int64_t targets = 0;
  evaluate_micro_batch(longest_rows(), &targets);
}

void RankTrainer::record_generation() { next_token_logits(longest_rows().front()); }

void RankTrainer::initialise_weights() {
  Device& device = *context_.device;
  fill(device, state_.master.tensor(), 0);  // the padding between parameters too
  if (state_.first_moment.taken()) {
    fill(device, state_.first_moment.tensor(), 0);
    fill(device, state_.second_moment.tensor(), 0);
  }
  initialise_parameters(device, table_, config_.training.seed, state_.master);
  refresh_compute_weights();
}

void RankTrainer::refresh_compute_weights() {
  if (state_.compute.taken()) cast(*context_.device, state_.master, state_.compute.tensor());
}

Row RankTrainer::row_of_sample(int64_t sample) const { return dataset_->row(Split::train, sampler_->row_of(sample)); }

// Row (micro_batch, dp rank, b) of a global batch, in that order of significance.
template <typename RowAt>
std::vector<Row> RankTrainer::micro_batch_rows(int64_t first, int64_t micro_batch, RowAt&& row_at) const {
  const int64_t B = config_.training.micro_batch_size;
  const int64_t begin = first + (micro_batch * sizes_.data_parallel_size + context_.coordinate(Dimension::dp)) * B;
  std::vector<Row> rows;
  for (int64_t b = 0; b < B; ++b) rows.push_back(row_at(begin + b));
  return rows;
}

double RankTrainer::train_micro_batch(std::span<const Row> rows, double gradient_scale, int64_t* local_targets) {
  const ProgramScope program(*context_.arena, "train");
  const LoadedBatch loaded = loader_.load(*context_.device, *context_.arena, rows);
  *local_targets += loaded.local_targets;
  return transformer_train(layers_, weights_, gradients_, loaded.batch, gradient_scale);
}

double RankTrainer::evaluate_micro_batch(std::span<const Row> rows, int64_t* local_targets) {
  const ProgramScope program(*context_.arena, "evaluate");
  const LoadedBatch loaded = loader_.load(*context_.device, *context_.arena, rows);
  *local_targets += loaded.local_targets;
  return transformer_evaluate(layers_, weights_, loaded.batch);
}

void RankTrainer::add_row(const Row& row, BatchTotals& totals) const {
  const Span whole = {0, layout_.padded_length()};
  totals.tokens += row.length;
  totals.targets += row.targets;
  totals.visible_pairs += loader_.mask_of(row).visible_pairs(whole, whole);
}

void RankTrainer::sum_over_ranks(std::span<double> values, std::string_view label) {
  const Tensor view(values.data(), DType::f64, {std::ssize(values)});
  context_.group(Dimension::dp_cp).all_reduce(view, label).wait();
}

BatchTotals RankTrainer::accumulate_gradients(int64_t step) {
  const int64_t batch = config_.training.global_batch_size;
  const int64_t first = (step - 1) * batch;
  const auto row_at = [&](int64_t sample) { return row_of_sample(sample); };
  BatchTotals totals;
  for (int64_t sample = first; sample < first + batch; ++sample) add_row(row_at(sample), totals);
  fill(*context_.device, state_.gradients.tensor(), 0);
  const double scale = totals.targets > 0 ? 1.0 / static_cast<double>(totals.targets) : 0.0;
  double loss_sum = 0;
  int64_t local_targets = 0;
  for (int64_t micro_batch = 0; micro_batch < sizes_.micro_batches; ++micro_batch)
    loss_sum += train_micro_batch(micro_batch_rows(first, micro_batch, row_at), scale, &local_targets);

  context_.group(Dimension::dp_cp).all_reduce(state_.gradients, "gradients").wait();
  std::array<double, 3> sums = {loss_sum, static_cast<double>(local_targets), stop_asked_ ? 1.0 : 0.0};
  sum_over_ranks(sums, "loss");
  FARSPAN_CHECK(static_cast<int64_t>(sums[1]) == totals.targets,
                "step {}: the ranks hold {} targets, the rows of the batch {}", step, sums[1], totals.targets);
  if (totals.targets > 0) totals.loss = sums[0] / static_cast<double>(totals.targets);
  stop_asked_ = sums[2] > 0;
  return totals;
}

StepReport RankTrainer::train_step(int64_t step, bool stop) {
  stop_asked_ = stop;
  StepReport report;
  report.totals = accumulate_gradients(step);
  report.stop_asked = stop_asked_;
  if (report.totals.targets == 0) {
    report.skipped = true;
    report.learning_rate = learning_rate(config_.optimizer, step);
    return report;
  }
  const UpdateResult update = update_weights(*context_.device, config_.optimizer, table_, step, updates_, state_);
  report.gradient_norm = update.gradient_norm;
  report.learning_rate = update.learning_rate;
  report.skipped = update.skipped;
  if (!update.skipped) ++updates_;
  return report;
}

BatchTotals RankTrainer::evaluate(Split split, int64_t batches) {
  const int64_t batch = config_.training.global_batch_size;
  const int64_t available = dataset_->rows(split);
  const int64_t end = batches > available / batch ? available : batches * batch;
  // Rows that the last batch lacks are padding.
  const auto row_at = [&](int64_t index) { return index < end ? dataset_->row(split, index) : Row{}; };
  BatchTotals totals;
  double loss_sum = 0;
  int64_t local_targets = 0;
  for (int64_t first = 0; first < end; first += batch) {
    for (int64_t index = first; index < std::min(first + batch, end); ++index) add_row(row_at(index), totals);
    for (int64_t micro_batch = 0; micro_batch < sizes_.micro_batches; ++micro_batch)
      loss_sum += evaluate_micro_batch(micro_batch_rows(first, micro_batch, row_at), &local_targets);
  }
  std::array<double, 2> sums = {loss_sum, static_cast<double>(local_targets)};
  sum_over_ranks(sums, "evaluation loss");
  FARSPAN_CHECK(static_cast<int64_t>(sums[1]) == totals.targets, "evaluation: the ranks hold {} targets, the rows {}",
                sums[1], totals.targets);
  if (totals.targets > 0) totals.loss = sums[0] / sums[1];
  return totals;
}

std::vector<float> RankTrainer::next_token_logits(const Row& row) {
  FARSPAN_CHECK(layout_.cp() == 1 && config_.training.micro_batch_size == 1, "generation: one rank and one row");
  const ProgramScope program(*context_.arena, "generate");
  const LoadedBatch loaded = loader_.load(*context_.device, *context_.arena, {&row, 1});
  const Buffer logits = layers_.take_f32("generate.logits", {config_.model.vocab_size}, Purpose::workspace);
  transformer_logits(layers_, weights_, loaded.batch, row.length - 1, logits.tensor());
  if (context_.device->dry()) return {};
  const float* values = logits.tensor().data<float>();
  return std::vector<float>(values, values + logits.tensor().numel());
}

}  // namespace farspan
