// SPDX-License-Identifier: Apache-2.0
#include "train/rank_trainer.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "device/host_access.h"
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
             kind == RunKind::train ? ParameterStore::Use::training : ParameterStore::Use::inference,
             kind == RunKind::train && train_passes() > 1 ? GradientPlace::resident : GradientPlace::taken_when_opened,
             embedding_group_),
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

void RankTrainer::run_step(int64_t passes, const std::function<void(int64_t)>& run_pass,
                           const std::function<void()>& finish) {
  const bool one_program = train_passes() == 1;
  store_.begin_step(sizes_.micro_batches);
  layers_.dropout = true;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const ProgramScope program(*context_.arena, "train");
    run_pass(pass);
    store_.finish_pass();
    if (one_program) finish();
  }
  if (one_program) return;
  const ProgramScope program(*context_.arena, "update");
  finish();
}

void RankTrainer::record_step(const std::function<void()>& after_pass) {
  const auto run_pass = [&](int64_t) {
    pass_.train(
        sizes_.micro_batches / train_passes(), [&](int64_t) { return longest_rows(); }, 1.0);
  };
  run_step(1, run_pass, [&] {
    after_pass();
    finish_recorded_step();
  });
}

void RankTrainer::record_update() {
  const ProgramScope program(*context_.arena, "update");
  finish_recorded_step();
}

void RankTrainer::finish_recorded_step() {
  store_.reduce_gradients();
  store_.update(1, 0);
  store_.release_gradients();
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

StepReport RankTrainer::train_step(int64_t step, bool stop, const std::function<void()>& with_gradients) {
  const int64_t batch = config_.training.global_batch_size;
  const int64_t first = (step - 1) * batch;
  const auto row_at = [&](int64_t sample) { return row_of_sample(sample); };
  StepReport report;
  BatchTotals& totals = report.totals;
  for (int64_t sample = first; sample < first + batch; ++sample) add_row(row_at(sample), totals);
  const double scale = totals.targets > 0 ? 1.0 / static_cast<double>(totals.targets) : 0.0;
  layers_.step = step;
  clear_loss();
  int64_t targets = 0;
  const auto run_pass = [&](int64_t pass) {
    const auto rows_of = [&](int64_t micro_batch) { return micro_batch_rows(first, pass + micro_batch, row_at); };
    targets += pass_.train(sizes_.micro_batches / train_passes(), rows_of, scale);
  };
  run_step(train_passes(), run_pass, [&] {
    context_.device->run_observed({.label = "sum gradients"}, [&] { store_.reduce_gradients(); });
    finish_totals(targets, stop, "loss", totals);
    if (with_gradients) with_gradients();
    update(step, report);
    store_.release_gradients();
  });
  report.stop_asked = stop;
  return report;
}

void RankTrainer::update(int64_t step, StepReport& report) {
  if (report.totals.targets == 0) {
    report.skipped = true;
    report.learning_rate = learning_rate(config_.optimizer, step);
    return;
  }
  UpdateResult result;
  context_.device->run_observed({.label = "update"}, [&] { result = store_.update(step, updates_); });
  report.gradient_norm = result.gradient_norm;
  report.learning_rate = result.learning_rate;
  report.skipped = result.skipped;
  if (!result.skipped) ++updates_;
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

template <typename Body>
void RankTrainer::for_each_held_run(StateKind kind, Body&& body) const {
  for (const Parameter& parameter : table_.parameters()) {
    const Tensor held = store_.held_values(kind, parameter);
    if (!held.defined()) continue;
    const HostValues values(*context_.device, held);
    const HeldRange range = store_.held(parameter);
    for (const Section& section : parameter.sections)
      for (const ElementRun& run : element_runs(parameter, section)) {
        const int64_t begin = std::max(run.part_begin, range.part_begin);
        const int64_t end = std::min(run.part_begin + run.length, range.part_end);
        if (begin >= end) continue;
        const float* first = values.tensor().data<float>() + begin - range.part_begin;
        body(parameter, section, run.whole_begin + begin - run.part_begin,
             std::span(first, static_cast<size_t>(end - begin)));
      }
  }
}

std::vector<float> RankTrainer::whole_values(StateKind kind) {
  if (!store_.has(kind)) return {};
  const ParameterTable whole(config_.model);
  std::vector<float> values(static_cast<size_t>(whole.flat_elements()));
  const bool counts = store_.sharded() || context_.group(Dimension::dp_cp).rank() == 0;
  for_each_held_run(kind, [&](const Parameter& parameter, const Section& section, int64_t at, auto held) {
    if (counts && section.owned) std::copy(held.begin(), held.end(), &values[whole.find(parameter.name).offset + at]);
  });
  const Tensor view(values.data(), DType::f32, {std::ssize(values)});
  context_.group(Dimension::world).all_reduce(view, "whole values").wait();
  return values;
}

bool RankTrainer::ranks_hold(StateKind kind, const std::vector<float>& whole) {
  const ParameterTable whole_table(config_.model);
  double differences = 0;
  for_each_held_run(kind, [&](const Parameter& parameter, const Section&, int64_t at, auto held) {
    const float* expected = &whole[whole_table.find(parameter.name).offset + at];
    for (float value : held) {
      if (!(value == *expected) && !(std::isnan(value) && std::isnan(*expected))) ++differences;
      ++expected;
    }
  });
  context_.group(Dimension::world).all_reduce(Tensor(&differences, DType::f64, {1}), "differing copies").wait();
  return differences == 0;
}

}  // namespace farspan
