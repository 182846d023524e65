// SPDX-License-Identifier: Apache-2.0
#include "train/rank_trainer.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "model/transformer.h"
#include "optim/schedule.h"
#include "train/model_share.h"

namespace farspan {
namespace {

// The group that sums the gradient of a tied embedding; null where this rank has the only copy, or none.
Communicator* make_embedding_group(const Config& config, RankContext& context, const PipelineLinks& links) {
  const bool end = links.stage() == 0 || links.stage() == links.stages() - 1;
  if (links.stages() == 1 || !end || config.model.untie_embeddings_and_output_weights) return nullptr;
  const std::vector<int>& ranks = context.group(Dimension::pp).ranks();
  return &context.add_group({ranks.front(), ranks.back()}, Dimension::pp);
}

// Calls body(parameter, section, run, elements of the run) for all that a unit holds.
template <typename Body>
void for_each_element_run(const ParameterTable& table, const ParameterUnit& unit, const Tensor& flat, Body&& body) {
  for (const Parameter& parameter : table.parameters_of(unit)) {
    const float* part = flat.data<float>() + parameter.offset - unit.begin;
    for (const Section& section : parameter.sections)
      for (const ElementRun& run : element_runs(parameter, section))
        body(parameter, section, run, part + run.part_begin);
  }
}

void copy_owned(const ParameterTable& table, const ParameterUnit& unit, const Tensor& flat, const ParameterTable& whole,
                std::vector<float>& values) {
  for_each_element_run(
      table, unit, flat,
      [&](const Parameter& parameter, const Section& section, const ElementRun& run, const float* part) {
        float* target = values.data() + whole.find(parameter.name).offset + run.whole_begin;
        if (section.owned) std::copy_n(part, run.length, target);
      });
}

}  // namespace

RankTrainer::RankTrainer(const Config& config, const ResolvedSizes& sizes, RankContext& context, const Dataset* dataset,
                         RunKind kind)
    : config_(config),
      sizes_(sizes),
      context_(context),
      dataset_(dataset),
      links_(context, static_cast<int>(sizes.pipeline_chunks)),
      chunks_(chunks_of_stage(config, sizes, links_.stage())),
      table_(config.model, model_share(config, sizes, links_.stage(), context.group(Dimension::tp).rank())),
      embedding_group_(make_embedding_group(config, context, links_)),
      store_(config, table_, context,
             kind == RunKind::train ? ParameterStore::Use::training : ParameterStore::Use::inference, embedding_group_),
      layout_(sequence_layout_of(config)),
      tensor_(context.group(Dimension::tp), config.parallel.sequence_parallel),
      attention_(config, context, layout_),
      loss_sum_(context.arena->take("loss_sum", DType::f64, {1}, Purpose::workspace)),
      layers_{.device = *context.device,
              .arena = *context.arena,
              .config = config.model,
              .tensor = tensor_,
              .attention = attention_.layers(),
              .keep = keep_policy(config.memory),
              .dtype = compute_dtype(config.training.precision),
              .fp8 = config.training.precision == Precision::fp8,
              .rows = config.training.micro_batch_size,
              .local_length = layout_.local_length(),
              .mlp_tile = config.memory.mlp_tile_tokens,
              .loss_tile = config.memory.loss_tile_tokens,
              .loss_sum = loss_sum_,
              .seed = config.training.seed},
      loader_(config, layout_, context.coordinate(Dimension::cp), dataset),
      pass_(layers_, store_, loader_, chunks_, links_) {
  if (dataset != nullptr && kind == RunKind::train)
    sampler_.emplace(dataset->rows(Split::train), config.training.seed, true);
}

// One document as long as the row: the mask with the most visible pairs.
std::vector<Row> RankTrainer::longest_rows() const {
  const int64_t S = config_.data.seq_length;
  const Row row = {.id = 0, .length = S, .documents = {Span{0, S}}, .targets = S - 1};
  return std::vector<Row>(static_cast<size_t>(config_.training.micro_batch_size), row);
}

void RankTrainer::record_pass() {
  store_.begin_step(sizes_.micro_batches);
  const ProgramScope program(*context_.arena, "train");
  layers_.dropout = true;
  pass_.train(
      links_.stages() == 1 ? 1 : sizes_.micro_batches, [&](int64_t) { return longest_rows(); }, 1.0);
  store_.finish_pass();
}

void RankTrainer::record_update() {
  store_.reduce_gradients();
  store_.update(1, 0);
}

void RankTrainer::record_state_visit() {
  store_.visit_units(StateKind::weights, [](const ParameterUnit&, const Tensor&) {});
}

void RankTrainer::record_evaluation() { evaluate_rows(longest_rows()); }

void RankTrainer::record_generation() { next_token_logits(longest_rows().front()); }

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

int64_t RankTrainer::run_passes(const PipelinePass::RowsOf& rows, double gradient_scale) {
  layers_.dropout = true;
  int64_t targets = 0;
  for (int64_t pass = 0; pass < train_passes(); ++pass) {
    const ProgramScope program(*context_.arena, "train");
    const auto rows_of = [&](int64_t micro_batch) { return rows(pass + micro_batch); };
    targets += pass_.train(sizes_.micro_batches / train_passes(), rows_of, gradient_scale);
    store_.finish_pass();
  }
  return targets;
}

int64_t RankTrainer::evaluate_rows(const std::vector<Row>& rows) {
  layers_.dropout = false;
  const ProgramScope program(*context_.arena, "evaluate");
  return pass_.evaluate(rows);
}

void RankTrainer::add_row(const Row& row, BatchTotals& totals) const {
  totals.tokens += row.length;
  totals.targets += row.targets;
  totals.layer_pairs += loader_.visible_pairs_of_layers(row);
}

void RankTrainer::clear_loss() {
  const double zero = 0;
  copy_to_device(*context_.device, &zero, loss_sum_.tensor().raw(), loss_sum_.tensor().bytes());
}

void RankTrainer::finish_totals(int64_t local_targets, bool& stop, std::string_view label, BatchTotals& totals) {
  double loss = 0;
  copy_to_host(*context_.device, loss_sum_.tensor().raw(), &loss, loss_sum_.tensor().bytes());
  const bool counts = tensor_.rank() == 0;
  std::array<double, 3> sums = {counts ? loss : 0.0, counts ? static_cast<double>(local_targets) : 0.0,
                                stop ? 1.0 : 0.0};
  const Tensor view(sums.data(), DType::f64, {std::ssize(sums)});
  context_.group(Dimension::world).all_reduce(view, label).wait();
  stop = sums[2] > 0;
  const int64_t targets = static_cast<int64_t>(sums[1]);
  FARSPAN_CHECK(targets == totals.targets, "{}: the ranks hold {} targets, the rows {}", label, targets,
                totals.targets);
  if (totals.targets > 0) totals.loss = sums[0] / static_cast<double>(totals.targets);
}

BatchTotals RankTrainer::accumulate_gradients(int64_t step) {
  const int64_t batch = config_.training.global_batch_size;
  const int64_t first = (step - 1) * batch;
  const auto row_at = [&](int64_t sample) { return row_of_sample(sample); };
  BatchTotals totals;
  for (int64_t sample = first; sample < first + batch; ++sample) add_row(row_at(sample), totals);
  layers_.step = step;
  store_.begin_step(sizes_.micro_batches);
  const double scale = totals.targets > 0 ? 1.0 / static_cast<double>(totals.targets) : 0.0;
  clear_loss();
  const int64_t targets =
      run_passes([&](int64_t micro_batch) { return micro_batch_rows(first, micro_batch, row_at); }, scale);
  context_.device->run_observed({.label = "sum gradients"}, [&] { store_.reduce_gradients(); });
  finish_totals(targets, stop_asked_, "loss", totals);
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
  UpdateResult update;
  context_.device->run_observed({.label = "update"}, [&] { update = store_.update(step, updates_); });
  report.gradient_norm = update.gradient_norm;
  report.learning_rate = update.learning_rate;
  report.skipped = update.skipped;
  if (!update.skipped) ++updates_;
  return report;
}

BatchTotals RankTrainer::evaluate(Split split, int64_t batches, const std::function<bool()>& stop) {
  const int64_t batch = config_.training.global_batch_size;
  const int64_t available = dataset_->rows(split);
  const int64_t end = batches > available / batch ? available : batches * batch;
  // Rows that the last batch lacks are padding.
  const auto row_at = [&](int64_t index) { return index < end ? dataset_->row(split, index) : Row{}; };
  BatchTotals totals;
  int64_t targets = 0;
  clear_loss();
  for (int64_t first = 0; first < end; first += batch) {
    if (stop && first > 0 && stop()) break;
    for (int64_t index = first; index < std::min(first + batch, end); ++index) add_row(row_at(index), totals);
    for (int64_t micro_batch = 0; micro_batch < sizes_.micro_batches; ++micro_batch)
      targets += evaluate_rows(micro_batch_rows(first, micro_batch, row_at));
  }
  bool no_wish = false;
  finish_totals(targets, no_wish, "evaluation loss", totals);
  return totals;
}

std::vector<float> RankTrainer::next_token_logits(const Row& row) {
  FARSPAN_CHECK(sizes_.world_size == 1 && config_.training.micro_batch_size == 1, "generation: one rank and one row");
  layers_.dropout = false;
  const ProgramScope program(*context_.arena, "generate");
  const LoadedBatch loaded = loader_.load(*context_.device, *context_.arena, {&row, 1});
  const Buffer logits = layers_.take_f32("generate.logits", {config_.model.vocab_size}, Purpose::workspace);
  transformer_logits(layers_, store_, chunks_.front(), loaded.batch, row.length - 1, logits.tensor());
  if (context_.device->dry()) return {};
  std::vector<float> values(static_cast<size_t>(logits.tensor().numel()));
  copy_to_host(*context_.device, logits.tensor().raw(), values.data(), logits.tensor().bytes());
  return values;
}

std::vector<float> RankTrainer::whole_values(StateKind kind) {
  const ParameterTable whole(config_.model);
  std::vector<float> values;
  const bool counts = context_.group(Dimension::dp_cp).rank() == 0;
  store_.visit_units(kind, [&](const ParameterUnit& unit, const Tensor& flat) {
    values.resize(static_cast<size_t>(whole.flat_elements()));
    if (counts) copy_owned(table_, unit, flat, whole, values);
  });
  const Tensor view(values.data(), DType::f32, {std::ssize(values)});
  if (!values.empty()) context_.group(Dimension::world).all_reduce(view, "whole values").wait();
  return values;
}

bool RankTrainer::ranks_hold(StateKind kind, const std::vector<float>& whole) {
  const ParameterTable whole_table(config_.model);
  double differences = 0;
  store_.visit_units(kind, [&](const ParameterUnit& unit, const Tensor& flat) {
    for_each_element_run(
        table_, unit, flat, [&](const Parameter& parameter, const Section&, const ElementRun& run, const float* part) {
          const float* expected = whole.data() + whole_table.find(parameter.name).offset + run.whole_begin;
          for (int64_t i = 0; i < run.length; ++i)
            if (!(part[i] == expected[i]) && !(std::isnan(part[i]) && std::isnan(expected[i]))) ++differences;
        });
  });
  context_.group(Dimension::world).all_reduce(Tensor(&differences, DType::f64, {1}), "differing copies").wait();
  return differences == 0;
}

}  // namespace farspan
