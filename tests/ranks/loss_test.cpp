// SPDX-License-Identifier: Apache-2.0
// Invariant 2 (design: the loss is global): one sum over all valid targets of the global batch, divided by their
// number.
#include "tests/ranks/training_case.h"

namespace farspan::testing_case {
namespace {

std::shared_ptr<const Dataset> rows(std::vector<std::vector<int64_t>> lengths, std::vector<int64_t> without = {}) {
  return std::make_shared<GivenRows>(std::move(lengths), 257, false, std::move(without));
}

TEST(Loss, B056_AccumulationOverUnequalTargetCountsEqualsTheLargeBatch) {
  // Rows of 2 and 8 targets: as one micro-batch of two, as two micro-batches, and on two data-parallel ranks.
  Config config = model_m(9);
  config.training.global_batch_size = 2;
  const auto dataset = rows({{3}, {9}});
  config.training.micro_batch_size = 2;
  const Outcome large = train(config, 1, dataset);
  config.training.micro_batch_size = 1;
  const Outcome accumulated = train(config, 1, dataset);
  const Outcome parallel = train(config, 2, dataset);
  EXPECT_EQ(large.steps[0].totals.targets, 10);
  expect_same_training(accumulated, large, "accumulated");
  expect_same_training(parallel, large, "dp 2");
}

// Documents of one token repeated: the first document of all rows holds token 0 alone, the next token 1, and so on.
class RepeatedTokens : public GivenRows {
 public:
  using GivenRows::GivenRows;
  void read(const Row& whole, Span span, std::span<int32_t> tokens, std::span<int32_t> labels) const override {
    GivenRows::read(whole, span, tokens, labels);
    int32_t token = 0;
    for (int64_t before = 0; before < whole.id; ++before)
      token += static_cast<int32_t>(row(Split::train, before).documents.size());
    for (const Span& document : whole.documents) {
      const Span part = intersect(document, span);
      for (int64_t at = part.begin; at < part.end; ++at) {
        const size_t i = static_cast<size_t>(at - span.begin);
        tokens[i] = token;
        if (labels[i] != kIgnoredLabel) labels[i] = token;
      }
      ++token;
    }
  }
};

// Weights with which token t, followed by itself, costs losses[t]. Layers add nothing; the embedding of t points along
// channel t, so the final norm gives sqrt(H) there (up to its epsilon, set to nothing), and the head reads that channel
// for the logit of t alone: with V - 1 other logits of 0, loss = log(1 + (V - 1) exp(-logit)).
void set_losses(RankTrainer& trainer, const std::vector<double>& losses) {
  HostFilled filled(*trainer.context().device, trainer.store().state(StateKind::weights));
  const Tensor flat = filled.tensor();
  const ParameterTable& table = trainer.parameters();
  std::fill_n(flat.data<float>(), flat.numel(), 0.0f);
  const auto weights = [&](const char* name) { return flat.data<float>() + table.find(name).offset; };
  const int64_t H = trainer.config().model.hidden_size;
  const double others = static_cast<double>(trainer.config().model.vocab_size - 1);
  std::fill_n(weights("final_norm.weight"), H, 1.0f);
  for (int64_t t = 0; t < std::ssize(losses); ++t) {
    const double logit = -std::log((std::exp(losses[static_cast<size_t>(t)]) - 1) / others);
    weights("embedding.weight")[t * H + t] = 1;
    weights("head.weight")[t * H + t] = static_cast<float>(logit / std::sqrt(static_cast<double>(H)));
  }
  filled.send();
  trainer.store().distribute_weights();
}

// Five targets that cost 2 each on rank 0, one that costs 9 on rank 1: 19 / 6, not the mean of 2 and 9. Under data
// parallelism the documents are rows of their own; under context parallelism rank 0 owns the first one.
TEST(Loss, B063_SumsAreDividedNotMeansAveraged) {
  Config config = model_m(12);
  config.model.norm_epsilon = 1e-12;
  config.optimizer.lr = 0;
  config.parallel.cp_layout = CpLayout::contiguous;
  const auto loss_of = [](const Config& layout, const std::vector<std::vector<int64_t>>& lengths) {
    const Job job = training_job(layout, 2, std::make_shared<RepeatedTokens>(lengths, 257));
    BatchTotals totals;
    std::optional<double> evaluated;
    run_job(job, [&](RankTrainer& trainer, World&) {
      set_losses(trainer, {2, 9});
      const BatchTotals of_batch = trainer.train_step(1, false).totals;
      const BatchTotals of_split = trainer.evaluate(Split::train, 1);
      if (trainer.context().rank != 0) return;
      totals = of_batch;
      evaluated = of_split.loss;
    });
    EXPECT_EQ(totals.targets, 6);
    EXPECT_NEAR(*evaluated, *totals.loss, 1e-6);
    return *totals.loss;
  };
  EXPECT_NEAR(loss_of(with_cp(config, 2), {{6, 2}}), 19.0 / 6, 1e-5);
  config.training.global_batch_size = 2;
  EXPECT_NEAR(loss_of(config, {{6}, {2}}), 19.0 / 6, 1e-5);
}

// Training goes on into the next epoch's order, so its batches are always full; the last batch of an evaluation is
// filled with padding. Here that is all that rank 1 of two gets, and it takes part.
TEST(Loss, B083_APartOfABatchIsTheSameOnEveryLayout) {
  const std::vector<std::vector<int64_t>> lengths = {{3}, {9}, {5}, {12}, {7}};
  constexpr int64_t kTargets = 3 + 9 + 5 + 12 + 7 - 5;
  Config config = model_m(12);
  config.training.micro_batch_size = 2;
  config.training.global_batch_size = 4;
  const Outcome one = train(config, 1, rows(lengths), 5);
  expect_same_training(train(config, 2, rows(lengths), 5), one, "dp 2");
  expect_same_training(train(with_cp(config, 2), 4, rows(lengths), 5), one, "dp 2, cp 2");
  int64_t targets = 0;
  for (const StepReport& step : one.steps) targets += step.totals.targets;
  EXPECT_EQ(targets, 4 * kTargets) << "five batches of four are four epochs of five rows";

  const auto evaluated = [&](int ranks) {
    BatchTotals totals;
    run_job(training_job(config, ranks, rows(lengths)), [&](RankTrainer& trainer, World&) {
      trainer.initialise_weights();
      const BatchTotals found = trainer.evaluate(Split::train, 2);
      if (trainer.context().rank == 0) totals = found;
    });
    return totals;
  };
  const BatchTotals whole = evaluated(1);
  const BatchTotals shared = evaluated(2);
  EXPECT_EQ(whole.targets, kTargets);
  EXPECT_EQ(shared.targets, kTargets);
  EXPECT_NEAR(*shared.loss / *whole.loss, 1, kSignalTolerance);
}

TEST(Loss, B057_ABatchWithoutTargetsMovesNothingAndReportsNoLoss) {
  Config config = model_m(12);
  config.optimizer.optimizer = OptimizerKind::adamw;
  config.optimizer.lr = 1e-2;
  config.optimizer.weight_decay = 0.1;
  const Outcome none = train(with_cp(config, 2), 2, rows({{12}}, {0}));
  EXPECT_FALSE(none.steps[0].totals.loss.has_value());
  EXPECT_TRUE(none.steps[0].skipped);
  EXPECT_EQ(none.steps[0].totals.targets, 0);
  const Outcome normal = train(with_cp(config, 2), 2, rows({{12}}));
  EXPECT_NE(none.weights, normal.weights);
  for (float weight : none.weights) EXPECT_TRUE(std::isfinite(weight));
  config.optimizer.lr = 0;
  EXPECT_EQ(none.weights, train(with_cp(config, 2), 2, rows({{12}})).weights) << "the start, untouched";
}

TEST(Loss, TrainingGoesOnAfterABatchWithoutTargets) {
  for (int64_t zero_stage : {0, 1, 2, 3}) {
    Config config = with_cp(model_m(12), 2);
    config.parallel.zero_stage = zero_stage;
    const Outcome outcome = train(config, 2, rows({{12}, {12}}, {0}), 4);
    const auto skipped = [](const StepReport& step) { return step.skipped; };
    EXPECT_EQ(std::count_if(outcome.steps.begin(), outcome.steps.end(), skipped), 2) << "ZeRO " << zero_stage;
    for (size_t rank = 0; rank < 2; ++rank) EXPECT_EQ(outcome.highest_bytes[rank], outcome.plans[rank].peak_bytes);
  }
}

TEST(Loss, B032_ARankThatHoldsOnlyPaddingTakesPart) {
  Config config = model_m(16);
  config.parallel.cp_layout = CpLayout::contiguous;
  const auto dataset = rows({{5}});
  const Outcome one = train(config, 1, dataset);
  EXPECT_EQ(one.steps[0].totals.targets, 4);
  for (CpCommType type : {CpCommType::p2p, CpCommType::all_gather})
    expect_same_training(train(with_cp(config, 4, type), 4, dataset), one, "ranks 2 and 3 hold padding");
}

TEST(Loss, B059_TargetsAreCountedOnceInEveryLayout) {
  Config config = model_m(16);
  const auto one_sequence = one_document_rows(1, 16);
  EXPECT_EQ(train(with_cp(config, 4), 4, one_sequence).steps[0].totals.targets, 15);
  config.training.global_batch_size = 4;
  EXPECT_EQ(train(config, 4, one_document_rows(4, 16)).steps[0].totals.targets, 60);
}

TEST(Loss, B060_ShiftLosesNoTargetAtAChunkEdge) {
  for (int64_t cp : {1, 2, 4, 8})
    EXPECT_EQ(train(with_cp(model_m(16), cp), static_cast<int>(cp), one_document_rows(1, 16)).steps[0].totals.targets,
              15);
  EXPECT_EQ(train(model_m(5), 1, one_document_rows(1, 5)).steps[0].totals.targets, 4);
}

TEST(Loss, B061_TrainingAndEvaluationLossAgreeAtEveryRankCount) {
  Config config = model_m(16);
  config.optimizer.lr = 0;
  config.training.global_batch_size = 4;
  const auto dataset = one_document_rows(4, 16);
  const double reference = *train(config, 1, dataset).steps[0].totals.loss;
  for (int64_t cp : {1, 2, 4}) {
    const Outcome outcome = train(with_cp(config, cp), static_cast<int>(cp), dataset);
    EXPECT_NEAR(*outcome.evaluation, reference, 1e-6 * reference) << cp;
    EXPECT_NEAR(*outcome.steps[0].totals.loss, reference, 1e-6 * reference) << cp;
  }
}

TEST(Loss, B064_EachRankHoldsItsShareOnce) {
  const SequenceLayout two(CpLayout::zigzag, 64, 2);
  const SequenceLayout four(CpLayout::zigzag, 64, 4);
  EXPECT_EQ(two.local_length(), 32);
  EXPECT_EQ(four.local_length(), 16);
  for (int64_t cp : {2, 4})
    EXPECT_EQ(train(with_cp(model_m(64), cp), static_cast<int>(cp), one_document_rows(1, 64)).steps[0].totals.targets,
              63);
}

TEST(Loss, B034_PackedDocumentsEqualSeparateRows) {
  Config packed = model_m(16);
  const Outcome together = train(with_cp(packed, 2), 2, rows({{5, 11}}));
  Config apart = model_m(16);
  apart.training.global_batch_size = 2;
  const Outcome separate = train(apart, 1, rows({{5}, {11}}));
  expect_same_training(together, separate, "5 and 11 tokens");
}

// Documents packed in a row and cut over ranks, against the same documents in rows of their own on one rank.
void expect_packed_equals_separate(const std::vector<int64_t>& lengths, int64_t seq_length, int64_t cp) {
  std::vector<std::vector<int64_t>> apart;
  for (int64_t length : lengths) apart.push_back({length});
  Config separate = model_m(seq_length);
  separate.training.global_batch_size = std::ssize(apart);
  const Outcome reference = train(separate, 1, rows(apart));
  int64_t targets = 0;
  for (int64_t length : lengths) targets += length - 1;
  for (CpCommType type : {CpCommType::p2p, CpCommType::all_gather}) {
    const Outcome packed = train(with_cp(model_m(seq_length), cp, type), static_cast<int>(cp), rows({lengths}));
    EXPECT_EQ(packed.steps[0].totals.targets, targets);
    expect_same_training(packed, reference, "packed over cp " + std::to_string(cp));
  }
}

TEST(Loss, B005_DocumentsShorterThanAnyAlignment) {
  expect_packed_equals_separate({2, 14}, 16, 2);
  expect_packed_equals_separate({1, 15}, 16, 2);
}

TEST(Loss, B038_DocumentsOfAnyLength) {
  for (int64_t cp : {2, 4}) expect_packed_equals_separate({5, 11, 1, 7}, 24, cp);
}

TEST(Loss, B039_PaddingBehindDocumentsIsNoDocument) { expect_packed_equals_separate({6, 7}, 16, 2); }

// Documents of 6 and 5 tokens; 4 zigzag ranks pad them to 16. Every array that has an element for each token has the
// same number of them, and every way that keys travel gives the loss of one rank.
TEST(Loss, B046_EveryArrayOfTokensIsPaddedAlike) {
  Config config = model_m(11);
  config.model.hidden_dropout = 0.1;
  const SequenceLayout layout(CpLayout::zigzag, 11, 4);
  ASSERT_EQ(layout.padded_length(), 16);
  const Row row = {.id = 0, .length = 11, .documents = {{0, 6}, {6, 11}}, .targets = 9};
  Device device(DeviceKind::dry, 1);
  Arena arena(device);
  const BatchLoader loader(config, layout, 3, nullptr);
  {
    const ProgramScope program(arena, "load");
    const LoadedBatch batch = loader.load(device, arena, std::span(&row, 1));
    for (const Buffer* tokens :
         {&batch.tokens, &batch.labels, &batch.positions, &batch.lo, &batch.hi, &batch.token_index})
      EXPECT_EQ(tokens->tensor().numel(), 16 / 4);
    EXPECT_EQ(batch.rope_table.tensor().dim(0), 16 / 4);
  }
  const Outcome one = train(config, 1, rows({{6, 5}}));
  for (CpCommType type : {CpCommType::p2p, CpCommType::all_gather, CpCommType::a2a, CpCommType::a2a_p2p})
    expect_same_training(train(with_cp(config, 4, type), 4, rows({{6, 5}})), one, "padded");
}

TEST(Loss, B040_PaddedRowsCountRealTokensOnly) { expect_packed_equals_separate({3, 6}, 12, 2); }

TEST(Loss, B045_EveryRowOfAMicroBatchKeepsItsOwnDocuments) {
  Config packed = model_m(16);
  packed.training.micro_batch_size = 2;
  packed.training.global_batch_size = 2;
  const Outcome together = train(with_cp(packed, 2), 2, rows({{5, 11}, {12, 4}}));
  packed.training.micro_batch_size = 1;
  expect_same_training(together, train(packed, 1, rows({{5, 11}, {12, 4}})), "two rows");
}

TEST(Loss, B118_TokensAreCountedOnceInEveryLayout) {
  Config config = model_m(64);
  config.training.global_batch_size = 4;
  for (const auto& [ranks, cp] : {std::pair<int, int64_t>{4, 1}, {4, 2}, {4, 4}}) {
    int64_t tokens = 0;
    for (const StepReport& step : train(with_cp(config, cp), ranks, one_document_rows(4, 64), 5).steps)
      tokens += step.totals.tokens;
    EXPECT_EQ(tokens, 1280);
  }
}

TEST(Loss, B120_AttentionWorkCountsVisiblePairsOnly) {
  Config config = model_m(64);
  EXPECT_EQ(train(config, 1, one_document_rows(1, 64)).steps[0].totals.layer_pairs, 2 * 64 * 65 / 2);
  EXPECT_EQ(train(with_cp(config, 4), 4, rows({{16, 16, 16, 16}})).steps[0].totals.layer_pairs, 2 * 4 * 16 * 17 / 2);
}

// Ids that 16 bits cannot hold.
class WideIds : public GivenRows {
 public:
  WideIds() : GivenRows({{4}}, 70002) {}
  void read(const Row&, Span span, std::span<int32_t> tokens, std::span<int32_t> labels) const override {
    constexpr int32_t kIds[] = {5, 65535, 65536, 70001};
    for (int64_t i = span.begin; i < span.end; ++i) {
      const size_t at = static_cast<size_t>(i - span.begin);
      tokens[at] = i < 4 ? kIds[i] : 0;
      labels[at] = i < 3 ? kIds[i + 1] : kIgnoredLabel;
    }
  }
};

TEST(Loss, B084_IdsPast65535Arrive) {
  Config config = model_m(4);
  config.model.vocab_size = 70002;
  const WideIds dataset;
  const SequenceLayout layout(CpLayout::zigzag, 4, 1);
  const BatchLoader loader(config, layout, 0, &dataset);
  const std::vector<Row> rows = {dataset.row(Split::train, 0)};
  Device dry(DryRun{DeviceKind::cpu});
  Arena recording(dry);
  {
    const ProgramScope program(recording, "load");
    loader.load(dry, recording, rows);
  }
  Device device(DeviceKind::cpu, 1);
  Arena arena(device, recording.plan());
  const ProgramScope program(arena, "load");
  const LoadedBatch loaded = loader.load(device, arena, rows);
  const int32_t* tokens = loaded.tokens.tensor().data<int32_t>();
  EXPECT_THAT(std::vector<int32_t>(tokens, tokens + 4), ::testing::ElementsAre(5, 65535, 65536, 70001));
  const int32_t* labels = loaded.labels.tensor().data<int32_t>();
  EXPECT_THAT(std::vector<int32_t>(labels, labels + 4), ::testing::ElementsAre(65535, 65536, 70001, kIgnoredLabel));
}

TEST(Loss, B111_EveryBatchSizeGivesTheGradientsOfItsRows) {
  for (int64_t batch = 1; batch <= 20; ++batch) {
    SCOPED_TRACE(batch);
    Config config = model_m(256);
    config.training.global_batch_size = batch;
    const auto dataset = one_document_rows(batch, 256);
    const Outcome alone = train(config, 1, dataset);
    config.training.micro_batch_size = batch;
    const Outcome together = train(config, 1, dataset);
    ASSERT_EQ(alone.gradients.size(), together.gradients.size());
    float largest = 0, difference = 0;
    for (size_t i = 0; i < alone.gradients.size(); ++i) {
      largest = std::max(largest, std::abs(alone.gradients[i]));
      difference = std::max(difference, std::abs(alone.gradients[i] - together.gradients[i]));
    }
    EXPECT_GT(largest, 0);
    EXPECT_LE(difference, 1e-5F * largest);  // sums of the same terms in another order
    EXPECT_EQ(together.highest_bytes[0], together.plans[0].peak_bytes);
  }
}

// Whether the gradients lie in the step's program (a batch of one row), or are resident.
TEST(Optimizer, B077_AGradientThatIsNotFiniteSkipsTheStepAndAHugeOneDoesNot) {
  for (int64_t batch : {1, 2}) {
    SCOPED_TRACE(batch);
    Config config = model_m(12);
    config.optimizer.clip_grad = 1;
    config.training.global_batch_size = batch;
    const Job job = training_job(config, 1, one_document_rows(8, 12));
    run_job(job, [&](RankTrainer& trainer, World&) {
      trainer.initialise_weights();
      const std::vector<float> before = copy_of(trainer, StateKind::weights);
      int64_t step = 0;
      const auto step_with = [&](float gradient) {
        return trainer.train_step(++step, false, [&] { set_gradients(trainer, gradient); });
      };
      EXPECT_TRUE(step_with(std::numeric_limits<float>::infinity()).skipped);
      EXPECT_TRUE(step_with(std::numeric_limits<float>::quiet_NaN()).skipped);
      EXPECT_EQ(copy_of(trainer, StateKind::weights), before);
      EXPECT_EQ(trainer.updates(), 0);
      const StepReport huge = step_with(2e22f);
      EXPECT_FALSE(huge.skipped);
      EXPECT_NEAR(huge.gradient_norm / 2e22, 1, 1e-6);
      EXPECT_NEAR(copy_of(trainer, StateKind::weights)[0], before[0] - 0.1, 1e-5) << "clipped to norm 1, lr 0.1";
      EXPECT_EQ(trainer.updates(), 1);
    });
  }
}

TEST(Optimizer, B073_DecayFallsOnMatricesOnly) {
  Config config = model_m(12);
  config.optimizer.optimizer = OptimizerKind::adamw;
  config.optimizer.lr = 0.1;
  config.optimizer.weight_decay = 0.1;
  config.model.add_qkv_bias = true;
  config.model.qk_layernorm = true;
  const Job job = training_job(config, 1, one_document_rows(1, 12));
  run_job(job, [&](RankTrainer& trainer, World&) {
    trainer.initialise_weights();
    const std::vector<float> before = copy_of(trainer, StateKind::weights);
    trainer.train_step(1, false, [&] { set_gradients(trainer, 0); });
    const std::vector<float> after = copy_of(trainer, StateKind::weights);
    for (const Parameter& parameter : trainer.parameters().parameters()) {
      const bool matrix = parameter.shape.rank() == 2;
      for (int64_t i = parameter.offset; i < parameter.offset + parameter.shape.numel(); ++i) {
        const size_t at = static_cast<size_t>(i);
        if (matrix) {
          EXPECT_NEAR(after[at], 0.99f * before[at], 1e-8f) << parameter.name;
        } else {
          EXPECT_EQ(after[at], before[at]) << parameter.name;
        }
      }
    }
  });
}

}  // namespace
}  // namespace farspan::testing_case
