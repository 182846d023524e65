// SPDX-License-Identifier: Apache-2.0
// One rank's training: its weights, its share of every batch, and the step. The same code runs on the dry device to
// record the memory plan, on thread ranks, and alone.
//
// The loss of a step is the sum of cross-entropy over all targets of the global batch divided by their number. The
// number follows from the rows alone, so every rank scales by it before the backward and gradients are summed over
// ranks once, in fp32, with no means to be averaged.
//
// A step's programs are its passes, "train", and what follows them, "update". Where there is but one pass both are one
// program: gradients then live in it and not beyond (optim/unit_gradients.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "config/config.h"
#include "data/dataset.h"
#include "model/layer_context.h"
#include "optim/parameter_store.h"
#include "parallel/pipeline/links.h"
#include "parallel/rank_context.h"
#include "train/attention_of_layers.h"
#include "train/batch_loader.h"
#include "train/pipeline_pass.h"

namespace farspan {

// What a rank is made for; decides what is resident and which programs are planned.
enum class RunKind { train, evaluate, generate };

// What one global batch held, summed over all ranks.
struct BatchTotals {
  int64_t tokens = 0;          // real tokens
  int64_t targets = 0;         // labels that count
  int64_t layer_pairs = 0;     // visible (query, key) pairs, summed over the layers
  std::optional<double> loss;  // mean over targets; none without a target
};

struct StepReport {
  BatchTotals totals;
  double gradient_norm = 0;
  double learning_rate = 0;
  bool skipped = false;     // weights were not updated: no target, or a gradient norm that is not finite
  bool stop_asked = false;  // some rank was asked to stop; all ranks see it at the same step
};

class RankTrainer {
 public:
  // Takes the resident buffers. `config` is resolved; `dataset` is null on the dry device.
  RankTrainer(const Config& config, const ResolvedSizes& sizes, RankContext& context, const Dataset* dataset,
              RunKind kind);

  // On the dry device: run each part of a step once, so that its memory and cost are recorded. record_step runs one
  // pass of those that train_passes() counts, calls `after_pass`, and runs what follows the passes; record_update that
  // alone.
  void record_step(const std::function<void()>& after_pass);
  void record_update();
  void record_state_visit();
  void record_evaluation();
  void record_generation();

  void initialise_weights() { store_.initialise(config_.training.seed); }

  // Passes of a step: one for each micro-batch, or one for all of them where a pipeline works on several at a time.
  int64_t train_passes() const { return links_.stages() == 1 ? sizes_.micro_batches : 1; }

  // Step `step` (from 1): gradients, summed over ranks, and the update. `stop` is this rank's wish to stop.
  // `with_gradients` is called between the two, when the store holds the step's gradients; perhaps within the step's
  // program, so it takes no buffers.
  StepReport train_step(int64_t step, bool stop, const std::function<void()>& with_gradients = {});
  // Mean loss over the first `batches` global batches of a split, read in order; fewer when the split is shorter.
  // `stop` is asked between batches, on every rank at the same place, and must answer alike: true ends there.
  BatchTotals evaluate(Split split, int64_t batches, const std::function<bool()>& stop = {});

  // Logits of the token that follows the row's last one. One rank only.
  std::vector<float> next_token_logits(const Row& row);

  const ParameterTable& parameters() const { return table_; }
  ParameterStore& store() { return store_; }
  // Every parameter's values of a kind, whole and on every rank, as the table of one rank lays them out. Collective;
  // for comparisons: it holds the whole model. Empty for a kind that there is none of.
  std::vector<float> whole_values(StateKind kind);
  // Whether what every rank holds of them is these very values (NaN equals NaN). Collective.
  bool ranks_hold(StateKind kind, const std::vector<float>& whole);
  int64_t updates() const { return updates_; }
  void set_updates(int64_t updates) { updates_ = updates; }
  RankContext& context() { return context_; }
  const Config& config() const { return config_; }
  const ResolvedSizes& sizes() const { return sizes_; }

 private:
  Row row_of_sample(int64_t sample) const;
  std::vector<Row> longest_rows() const;
  // The rows of this rank's micro-batch `micro_batch` of the global batch that begins at `first`; `row_at` gives the
  // batch's rows by number.
  template <typename RowAt>
  std::vector<Row> micro_batch_rows(int64_t first, int64_t micro_batch, RowAt&& row_at) const;
  // The programs of a step with so many passes.
  void run_step(int64_t passes, const std::function<void(int64_t pass)>& run_pass, const std::function<void()>& finish);
  void finish_recorded_step();
  void update(int64_t step, StepReport& report);
  // Calls body(parameter, section, first element of the whole, values) for all runs of elements that this rank holds.
  template <typename Body>
  void for_each_held_run(StateKind kind, Body&& body) const;
  int64_t evaluate_rows(const std::vector<Row>& rows);
  void add_row(const Row& row, BatchTotals& totals) const;
  void clear_loss();
  // Sums what the last stage's ranks hold, the losses added up since clear_loss and `local_targets`, and puts the loss
  // into `totals`; tensor-parallel ranks hold the same and count once. `stop` becomes whether any rank's was set.
  void finish_totals(int64_t local_targets, bool& stop, std::string_view label, BatchTotals& totals);

  const Config& config_;
  ResolvedSizes sizes_;
  RankContext& context_;
  const Dataset* dataset_;
  PipelineLinks links_;
  std::vector<ModelChunk> chunks_;
  ParameterTable table_;
  Communicator* embedding_group_;
  ParameterStore store_;
  SequenceLayout layout_;
  TensorParallel tensor_;
  AttentionOfLayers attention_;
  Buffer loss_sum_;  // (1) f64
  LayerContext layers_;
  BatchLoader loader_;
  PipelinePass pass_;
  std::optional<Sampler> sampler_;
  int64_t updates_ = 0;
};

}  // namespace farspan
