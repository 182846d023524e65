// SPDX-License-Identifier: Apache-2.0
// One rank's training: its weights, its share of every batch, and the step. The same code runs on the dry device to
// record the memory plan, on thread ranks, and alone.
//
// The loss of a step is the sum of cross-entropy over all targets of the global batch divided by their number. The
// number follows from the rows alone, so every rank scales by it before the backward and gradients are summed over
// ranks once, in fp32, with no means to be averaged.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "config/config.h"
#include "data/dataset.h"
#include "model/layer_context.h"
#include "model/parameters.h"
#include "optim/optimizer.h"
#include "parallel/rank_context.h"
#include "train/batch_loader.h"

namespace farspan {

// What a rank is made for; decides what is resident and which programs are planned.
enum class RunKind { train, evaluate, generate };

// What one global batch held, summed over all ranks.
struct BatchTotals {
  int64_t tokens = 0;          // real tokens
  int64_t targets = 0;         // labels that count
  int64_t visible_pairs = 0;   // (query, key) pairs of attention
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

  // On the dry device: run each part of a step once, so that its memory and cost are recorded.
  void record_micro_batch();
  void record_update();
  void record_evaluation();
  void record_generation();

  void initialise_weights();
  // After master weights were written from outside: refreshes the bf16 copy.
  void refresh_compute_weights();

  // Gradients of step `step` (from 1) into the gradient buffer, summed over ranks.
  BatchTotals accumulate_gradients(int64_t step);
  // accumulate_gradients and the update. `stop` is this rank's wish to stop.
  StepReport train_step(int64_t step, bool stop);
  // Mean loss over the first `batches` global batches of a split, read in order; fewer when the split is shorter.
  BatchTotals evaluate(Split split, int64_t batches);

  // Logits of the token that follows the row's last one. One rank only.
  std::vector<float> next_token_logits(const Row& row);

  const ParameterTable& parameters() const { return table_; }
  WeightState& weights() { return state_; }
  int64_t updates() const { return updates_; }
  void set_updates(int64_t updates) { updates_ = updates; }
  RankContext& context() { return context_; }

 private:
  Row row_of_sample(int64_t sample) const;
  std::vector<Row> longest_rows() const;
  // The rows of this rank's micro-batch `micro_batch` of the global batch that begins at `first`; `row_at` gives the
  // batch's rows by number.
  template <typename RowAt>
  std::vector<Row> micro_batch_rows(int64_t first, int64_t micro_batch, RowAt&& row_at) const;
  double train_micro_batch(std::span<const Row> rows, double gradient_scale, int64_t* local_targets);
  double evaluate_micro_batch(std::span<const Row> rows, int64_t* local_targets);
  void add_row(const Row& row, BatchTotals& totals) const;
  void sum_over_ranks(std::span<double> values, std::string_view label);

  const Config& config_;
  ResolvedSizes sizes_;
  RankContext& context_;
  const Dataset* dataset_;
  ParameterTable table_;
  WeightState state_;
  ModelTensors weights_;
  ModelTensors gradients_;
  SequenceLayout layout_;
  ContextAttention attention_;
  LayerContext layers_;
  BatchLoader loader_;
  std::optional<Sampler> sampler_;
  int64_t updates_ = 0;
  bool stop_asked_ = false;
};

}  // namespace farspan
