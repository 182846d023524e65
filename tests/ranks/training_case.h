// SPDX-License-Identifier: Apache-2.0
// Small whole trainings on thread ranks: a dataset made of given document lengths, and what a run leaves behind.
#pragma once

#include <algorithm>
#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/philox.h"
#include "data/dataset.h"
#include "device/host_access.h"
#include "tests/device.h"
#include "train/job.h"

namespace farspan::testing_case {

// The thread sanitizer slows every access by an order of magnitude, and it looks for races, not for wrong numbers:
// tests of many cases of one kind run fewer of them there.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

// Rows given by the lengths of their documents; what is left of seq_length is padding. Token values are random and
// follow one another through all rows, so the same documents dealt to rows otherwise hold the same tokens. A token's
// label is the next token of its document; `without_targets` rows have none.
class GivenRows : public Dataset {
 public:
  GivenRows(std::vector<std::vector<int64_t>> rows, int64_t vocab_size, bool cross_documents = false,
            std::vector<int64_t> without_targets = {})
      : rows_(std::move(rows)),
        vocab_size_(vocab_size),
        cross_documents_(cross_documents),
        without_targets_(std::move(without_targets)) {}

  int64_t rows(Split) const override { return std::ssize(rows_); }
  Row row(Split, int64_t index) const override {
    Row row;
    row.id = index;
    for (int64_t length : rows_[static_cast<size_t>(index)]) {
      row.documents.push_back({row.length, row.length + length});
      row.length += length;
    }
    for (int64_t i = 0; i < row.length; ++i) row.targets += label(row, i) != kIgnoredLabel;
    return row;
  }
  void read(const Row& row, Span span, std::span<int32_t> tokens, std::span<int32_t> labels) const override {
    for (int64_t i = 0; i < span.length(); ++i) {
      const int64_t at = span.begin + i;
      tokens[static_cast<size_t>(i)] = at < row.length ? token(row, at) : 0;
      if (!labels.empty()) labels[static_cast<size_t>(i)] = label(row, at);
    }
  }
  int64_t vocab_size() const override { return vocab_size_; }
  int64_t total_tokens() const override { return 0; }
  int64_t documents() const override { return 0; }
  std::string identity() const override { return "given rows"; }
  std::string summary() const override { return "given rows"; }

 private:
  int32_t token(const Row& row, int64_t at) const {
    int64_t in_stream = at;
    for (int64_t before = 0; before < row.id; ++before)
      for (int64_t length : rows_[static_cast<size_t>(before)]) in_stream += length;
    const double draw = Philox(11, "tokens").uniform(static_cast<uint64_t>(in_stream));
    return static_cast<int32_t>(draw * static_cast<double>(vocab_size_));
  }
  int32_t label(const Row& row, int64_t at) const {
    if (std::find(without_targets_.begin(), without_targets_.end(), row.id) != without_targets_.end())
      return kIgnoredLabel;
    if (at + 1 >= row.length) return kIgnoredLabel;
    const bool last_of_document = std::any_of(row.documents.begin(), row.documents.end(),
                                              [&](const Span& document) { return document.end == at + 1; });
    return last_of_document && !cross_documents_ ? kIgnoredLabel : token(row, at + 1);
  }

  std::vector<std::vector<int64_t>> rows_;
  int64_t vocab_size_;
  bool cross_documents_;
  std::vector<int64_t> without_targets_;
};

// Model M of the known failures: 2 layers, hidden 32, 4 query and 2 key/value heads of 8, SwiGLU 64, vocabulary 257.
inline Config model_m(int64_t seq_length) {
  Config config;
  config.model.num_layers = 2;
  config.model.hidden_size = 32;
  config.model.num_attention_heads = 4;
  config.model.num_query_groups = 2;
  config.model.kv_channels = 8;
  config.model.ffn_hidden_size = 64;
  config.model.vocab_size = 257;
  config.model.untie_embeddings_and_output_weights = true;
  config.data.path = {"unused"};
  config.data.seq_length = seq_length;
  config.training.seed = 5;
  config.training.device = test::testing_cuda() ? DeviceChoice::cuda : DeviceChoice::cpu;
  config.training.eval_iters = 1;
  config.optimizer.optimizer = OptimizerKind::sgd;
  config.optimizer.lr = 0.1;
  config.optimizer.lr_decay_style = LrDecay::constant;
  config.optimizer.weight_decay = 0;
  config.optimizer.clip_grad = 0;
  config.communication.distributed_timeout_seconds = 60;
  return config;
}

inline std::shared_ptr<const Dataset> one_document_rows(int64_t rows, int64_t length) {
  return std::make_shared<GivenRows>(std::vector<std::vector<int64_t>>(static_cast<size_t>(rows), {length}), 257);
}

struct Outcome {
  std::vector<StepReport> steps;
  double gradient_norm = 0;            // of the last step
  std::vector<float> gradients;        // whole, flat as of one rank, of the first step: all start from the same weights
  std::vector<float> weights;          // likewise, after the last step
  bool ranks_agree = false;            // every copy of a gradient or a weight holds these values
  std::vector<int64_t> highest_bytes;  // of every rank
  std::vector<MemoryPlan> plans;       // of every rank
  std::optional<double> evaluation;
  std::shared_ptr<const ParameterTable> table;  // of one rank
};

inline Config with_cp(Config config, int64_t cp, CpCommType type = CpCommType::p2p) {
  config.parallel.context_parallel_size = cp;
  config.parallel.cp_comm_type = {type};
  return config;
}

inline std::vector<float> copy_of(RankTrainer& trainer, StateKind kind) {
  const HostValues flat(*trainer.context().device, trainer.store().state(kind));
  return std::vector<float>(flat.tensor().data<float>(), flat.tensor().data<float>() + flat.tensor().numel());
}

// Gradients that are zero but for the first element of the first parameter held.
inline void set_gradients(RankTrainer& trainer, float first) {
  Device& device = *trainer.context().device;
  bool is_first = true;
  for (const Parameter& parameter : trainer.parameters().parameters()) {
    const Tensor gradient = trainer.store().held_values(StateKind::gradients, parameter);
    if (!gradient.defined()) continue;
    fill(device, gradient, 0);
    if (std::exchange(is_first, false)) copy_to_device(device, &first, gradient.raw(), sizeof(first));
  }
}

// A training job of one thread a rank: on data this small several would wait for one another longer than they work,
// the more so where another program holds one of their cores.
inline Job training_job(const Config& config, int ranks, const std::shared_ptr<const Dataset>& dataset,
                        int threads = 1) {
  Job job = make_job(config, ranks, RunKind::train, dataset);
  job.threads = threads;
  return job;
}

inline Outcome train(const Config& config, int ranks, const std::shared_ptr<const Dataset>& dataset, int64_t steps = 1,
                     int threads = 1) {
  const Job job = training_job(config, ranks, dataset, threads);
  Outcome outcome;
  outcome.highest_bytes.resize(static_cast<size_t>(ranks));
  for (const RankRecord& record : job.records) outcome.plans.push_back(*record.memory);
  outcome.table = std::make_shared<ParameterTable>(job.config.model);
  run_job(job, [&](RankTrainer& trainer, World&) {
    const size_t rank = static_cast<size_t>(trainer.context().rank);
    trainer.initialise_weights();
    std::vector<float> gradients;
    bool agree = true;
    for (int64_t step = 1; step <= steps; ++step) {
      const StepReport report = trainer.train_step(step, false, [&] {
        if (step > 1) return;
        gradients = trainer.whole_values(StateKind::gradients);
        agree = trainer.ranks_hold(StateKind::gradients, gradients);
      });
      if (rank == 0) outcome.steps.push_back(report);
    }
    std::vector<float> weights = trainer.whole_values(StateKind::weights);
    agree = trainer.ranks_hold(StateKind::weights, weights) && agree;
    const BatchTotals evaluation = trainer.evaluate(Split::train, 1);
    if (rank == 0) {
      outcome.gradients = std::move(gradients);
      outcome.weights = std::move(weights);
      outcome.ranks_agree = agree;
      outcome.evaluation = evaluation.loss;
    }
    outcome.highest_bytes[rank] = trainer.context().arena->highest_byte();
  });
  outcome.gradient_norm = outcome.steps.back().gradient_norm;
  return outcome;
}

// Largest difference of one parameter's values, relative to its largest value in `expected`; the worst parameter wins.
struct Worst {
  std::string name;
  double relative = 0;
};

inline Worst worst_parameter(const ParameterTable& table, const std::vector<float>& actual,
                             const std::vector<float>& expected) {
  Worst worst;
  for (const Parameter& parameter : table.parameters()) {
    double largest = 0;
    double difference = 0;
    for (int64_t i = parameter.offset; i < parameter.offset + parameter.shape.numel(); ++i) {
      const double a = actual[static_cast<size_t>(i)];
      const double e = expected[static_cast<size_t>(i)];
      largest = std::max(largest, std::abs(e));
      if (!(std::abs(a - e) <= difference)) difference = std::abs(a - e);
    }
    const double relative = largest > 0 ? difference / largest : difference;
    if (!(relative <= worst.relative)) worst = {parameter.name, relative};
  }
  return worst;
}

// fp32 sums in another order: some units in the last place of the largest element (2^-24), never near this.
inline constexpr double kSignalTolerance = 1e-5;

inline void expect_same_training(const Outcome& actual, const Outcome& expected, const std::string& what) {
  ASSERT_EQ(actual.steps.size(), expected.steps.size());
  for (size_t i = 0; i < actual.steps.size(); ++i) {
    ASSERT_EQ(actual.steps[i].totals.loss.has_value(), expected.steps[i].totals.loss.has_value()) << what;
    if (expected.steps[i].totals.loss) {
      EXPECT_NEAR(*actual.steps[i].totals.loss / *expected.steps[i].totals.loss, 1, kSignalTolerance) << what;
    }
    if (expected.steps[i].gradient_norm > 0) {
      EXPECT_NEAR(actual.steps[i].gradient_norm / expected.steps[i].gradient_norm, 1, kSignalTolerance) << what;
    }
    EXPECT_EQ(actual.steps[i].totals.targets, expected.steps[i].totals.targets) << what;
  }
  EXPECT_TRUE(actual.ranks_agree) << what;
  const Worst gradient = worst_parameter(*expected.table, actual.gradients, expected.gradients);
  EXPECT_LE(gradient.relative, kSignalTolerance) << what << ", gradient of " << gradient.name;
  const Worst weight = worst_parameter(*expected.table, actual.weights, expected.weights);
  EXPECT_LE(weight.relative, kSignalTolerance) << what << ", weight " << weight.name;
  ASSERT_EQ(actual.evaluation.has_value(), expected.evaluation.has_value()) << what;
  if (expected.evaluation) {
    EXPECT_NEAR(*actual.evaluation / *expected.evaluation, 1, kSignalTolerance) << what;
  }
}

inline void expect_same_bits(const Outcome& actual, const Outcome& expected, const std::string& what) {
  ASSERT_EQ(actual.steps.size(), expected.steps.size());
  for (size_t i = 0; i < actual.steps.size(); ++i) {
    EXPECT_EQ(actual.steps[i].totals.loss, expected.steps[i].totals.loss) << what;
    EXPECT_EQ(actual.steps[i].gradient_norm, expected.steps[i].gradient_norm) << what;
  }
  EXPECT_EQ(actual.gradients, expected.gradients) << what;
  EXPECT_EQ(actual.weights, expected.weights) << what;
}

}  // namespace farspan::testing_case
