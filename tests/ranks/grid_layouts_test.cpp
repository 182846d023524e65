// SPDX-License-Identifier: Apache-2.0
// Invariant 1 (design: exact) over the whole grid: tensor, sequence, context, pipeline and data parallelism, ZeRO and
// recomputation against one rank. Loss, gradient norm, every gradient, and the weights after several steps.
#include "tests/ranks/training_case.h"

namespace farspan::testing_case {
namespace {

std::shared_ptr<const Dataset> documents() {
  return std::make_shared<GivenRows>(
      std::vector<std::vector<int64_t>>{{1, 2, 5, 11, 13}, {32}, {7, 20}, {16, 16}, {3, 29}, {32}, {9, 23}, {30}}, 257);
}

struct Layout {
  int64_t tp = 1;
  bool sp = false;
  int64_t cp = 1;
  int64_t pp = 1;
  int64_t dp = 1;
  int64_t zero = 0;
  bool overlap = false;
  int64_t virtual_layers = 0;
  CpCommType type = CpCommType::p2p;
  int ranks() const { return static_cast<int>(tp * cp * pp * dp); }
  std::string text() const {
    return fmt::format("tp {}{} cp {} pp {} dp {} zero {}{} virtual {}", tp, sp ? " sp" : "", cp, pp, dp, zero,
                       overlap ? " overlap" : "", virtual_layers);
  }
};

Config laid_out(Config config, const Layout& layout) {
  config.parallel.tensor_model_parallel_size = layout.tp;
  config.parallel.sequence_parallel = layout.sp;
  config.parallel.context_parallel_size = layout.cp;
  config.parallel.cp_comm_type = {layout.type};
  config.parallel.pipeline_model_parallel_size = layout.pp;
  config.parallel.num_layers_per_virtual_pipeline_stage = layout.virtual_layers;
  config.parallel.zero_stage = layout.zero;
  config.parallel.overlap_grad_reduce = layout.overlap;
  config.parallel.overlap_param_gather = layout.overlap;
  return config;
}

Config grid_model() {
  Config config = model_m(32);
  config.model.num_layers = 4;
  config.training.global_batch_size = 4;
  config.optimizer.clip_grad = 0.5;
  return config;
}

void expect_like_one_rank(const Config& config, const std::vector<Layout>& layouts, int64_t steps = 2) {
  const auto dataset = documents();
  const Outcome one = train(config, 1, dataset, steps);
  for (const Layout& layout : layouts) {
    const Outcome outcome = train(laid_out(config, layout), layout.ranks(), dataset, steps);
    expect_same_training(outcome, one, layout.text());
    for (size_t rank = 0; rank < outcome.plans.size(); ++rank)
      EXPECT_EQ(outcome.highest_bytes[rank], outcome.plans[rank].peak_bytes) << layout.text() << " rank " << rank;
  }
}

TEST(GridLayouts, TensorParallel) {
  expect_like_one_rank(grid_model(), {{.tp = 2}, {.tp = 2, .sp = true}, {.tp = 4}, {.tp = 4, .sp = true}});
}

TEST(GridLayouts, ZeroStages) {
  for (bool overlap : {false, true})
    for (int64_t zero : {0, 1, 2, 3})
      expect_like_one_rank(grid_model(), {{.dp = 2, .zero = zero, .overlap = overlap},
                                          {.cp = 2, .dp = 2, .zero = zero, .overlap = overlap}});
}

// A micro-batch a step: gradients live in the step's program alone. Of one rank alone there are two passes a step.
TEST(GridLayouts, StepsOfOnePass) {
  Config config = grid_model();
  config.model.num_query_groups = 1;
  config.model.add_qkv_bias = true;
  config.model.qk_layernorm = true;
  config.training.global_batch_size = 2;
  for (bool untied : {false, true})
    for (bool overlap : {false, true})
      for (int64_t zero : {0, 1, 2, 3}) {
        config.model.untie_embeddings_and_output_weights = untied;
        expect_like_one_rank(config, {{.dp = 2, .zero = zero, .overlap = overlap},
                                      {.tp = 2, .sp = true, .dp = 2, .zero = zero, .overlap = overlap},
                                      {.cp = 2, .pp = 2, .dp = 2, .zero = zero, .overlap = overlap}});
      }
}

TEST(GridLayouts, Pipeline) {
  expect_like_one_rank(grid_model(), {{.pp = 2}, {.pp = 4}, {.pp = 3}, {.pp = 2, .virtual_layers = 1}});
}

TEST(GridLayouts, EverythingAtOnce) {
  expect_like_one_rank(grid_model(), {{.tp = 2, .sp = true, .cp = 2, .pp = 2},
                                      {.tp = 2, .pp = 2, .dp = 2, .zero = 3},
                                      {.cp = 2, .pp = 2, .dp = 2, .zero = 2},
                                      {.tp = 2, .sp = true, .cp = 2, .dp = 2, .zero = 1}});
}

TEST(GridLayouts, B010_FewerKeyValueHeadsThanTensorRanks) {
  Config config = grid_model();
  config.model.num_query_groups = 1;
  config.model.add_qkv_bias = true;
  expect_like_one_rank(config, {{.tp = 2}, {.tp = 4, .sp = true}, {.tp = 4, .dp = 2, .zero = 2}});
}

TEST(GridLayouts, B068_CopiesOfASharedHeadStayEqualBitForBit) {
  Config config = grid_model();
  config.model.num_query_groups = 1;
  config.optimizer.optimizer = OptimizerKind::adamw;
  for (const Layout& layout : {Layout{.tp = 2}, Layout{.tp = 4, .sp = true}})
    EXPECT_TRUE(train(laid_out(config, layout), layout.ranks(), documents(), 3).ranks_agree) << layout.text();
}

TEST(GridLayouts, B012_FewerMicroBatchesThanStages) {
  Config config = grid_model();
  for (int64_t batch : {1, 3}) {
    config.training.global_batch_size = batch;
    expect_like_one_rank(config, {{.pp = 4}, {.pp = 2, .virtual_layers = 1}});
  }
}

TEST(GridLayouts, UnevenStages) {
  Config config = grid_model();
  config.model.num_layers = 5;
  const auto dataset = documents();
  const Outcome one = train(config, 1, dataset, 2);
  Config uneven = laid_out(config, {.pp = 3});
  uneven.parallel.decoder_first_pipeline_num_layers = 1;
  uneven.parallel.decoder_last_pipeline_num_layers = 3;
  expect_same_training(train(uneven, 3, dataset, 2), one, "1 + 1 + 3 layers");
  expect_like_one_rank(config, {{.pp = 2}, {.pp = 4}, {.pp = 5}});
}

TEST(GridLayouts, TiedEmbeddingOnFirstAndLastStage) {
  Config config = grid_model();
  config.model.untie_embeddings_and_output_weights = false;
  config.optimizer.optimizer = OptimizerKind::adamw;
  config.optimizer.adam_eps = 1e-4;
  config.optimizer.lr = 2e-3;
  for (int64_t zero : {0, 1, 2, 3})
    expect_like_one_rank(config, {{.pp = 2, .dp = 2, .zero = zero}, {.tp = 2, .pp = 2, .zero = zero}}, 3);
}

TEST(GridLayouts, B049_PipelineWithContextParallelism) { expect_like_one_rank(grid_model(), {{.cp = 2, .pp = 2}}, 10); }

TEST(GridLayouts, B062_TheSameLossForTensorAndContextParallelismTogether) {
  Config config = grid_model();
  config.optimizer.lr = 0;
  const double one = *train(config, 1, documents()).steps[0].totals.loss;
  for (const Layout& layout : {Layout{.tp = 2}, Layout{.cp = 2}, Layout{.tp = 2, .cp = 2}})
    EXPECT_NEAR(*train(laid_out(config, layout), layout.ranks(), documents()).steps[0].totals.loss / one, 1, 1e-6)
        << layout.text();
}

TEST(GridLayouts, B065_GradientNormDoesNotDependOnThePipeline) {
  Config config = grid_model();
  const Outcome one = train(config, 1, documents());
  const Outcome two = train(laid_out(config, {.pp = 2}), 2, documents());
  EXPECT_NEAR(two.gradient_norm / one.gradient_norm, 1, kSignalTolerance);
}

TEST(GridLayouts, B067_HeadsTradedForTokensLeaveTheGradientScaleAlone) {
  expect_like_one_rank(grid_model(), {{.cp = 2, .type = CpCommType::a2a}, {.cp = 4, .type = CpCommType::a2a}});
}

// Rows of 8, 16, 8 and 24 real tokens, one after the other through the stages.
TEST(GridLayouts, B115_RowsOfDifferentLengthThroughAPipeline) {
  const auto dataset = std::make_shared<GivenRows>(std::vector<std::vector<int64_t>>{{8}, {16}, {8}, {24}}, 257);
  const Config config = grid_model();
  const Outcome one = train(config, 1, dataset, 2);
  for (const Layout& layout : {Layout{.tp = 2, .pp = 2}, Layout{.pp = 4}, Layout{.tp = 2, .pp = 4}})
    expect_same_training(train(laid_out(config, layout), layout.ranks(), dataset, 2), one, layout.text());
}

TEST(GridLayouts, B116_PipelineMessagesAreAsLongAsTheLocalTokens) {
  Config config = laid_out(grid_model(), {.cp = 2, .pp = 2});
  config.data.seq_length = 64;
  config.training.global_batch_size = 3;
  const Job job = training_job(config, 4, one_document_rows(3, 64));
  std::array<int64_t, 4> received{};
  run_job(job, [&](RankTrainer& trainer, World&) {
    trainer.initialise_weights();
    trainer.context().reset_traffic();
    trainer.train_step(1, false);
    received[static_cast<size_t>(trainer.context().rank)] = trainer.context().traffic(Dimension::pp).bytes_received;
  });
  for (int64_t bytes : received) EXPECT_EQ(bytes, 3 * 64 / 2 * 32 * 4);
  for (const RankRecord& record : job.records)
    EXPECT_EQ(record.micro_batch.traffic[static_cast<size_t>(Dimension::pp)].bytes_received, 4096);
}

// parallel/tensor/tensor_parallel.h and optim/parameter_store.h give the formulas.
TEST(GridLayouts, BytesOfEveryDimensionEqualTheFormulas) {
  const auto bytes_of = [](const Layout& layout, Dimension dimension) {
    Config config = laid_out(grid_model(), layout);
    const Job job = training_job(config, layout.ranks(), one_document_rows(4, 32));
    std::vector<int64_t> received(static_cast<size_t>(layout.ranks()));
    run_job(job, [&](RankTrainer& trainer, World&) {
      trainer.initialise_weights();
      trainer.context().reset_traffic();
      trainer.train_step(1, false);
      received[static_cast<size_t>(trainer.context().rank)] = trainer.context().traffic(dimension).bytes_received;
    });
    for (size_t rank = 0; rank < received.size(); ++rank) {
      const RankRecord& record = job.records[rank];
      const size_t at = static_cast<size_t>(dimension);
      EXPECT_EQ(received[rank], record.micro_batch.traffic[at].bytes_received * job.sizes.micro_batches +
                                    record.update.traffic[at].bytes_received)
          << layout.text();
    }
    return received[0];
  };
  // Four rows of 32 tokens of 32 channels through four layers, fp32. Selective recomputation repeats the sum of the
  // attention output, and under sequence parallelism gathers what columns read once more.
  const int64_t stream = 4 * 32 * 32 * 4;
  const int64_t half = stream / 2;  // (n - 1) / n of it
  const int64_t statistics = 4 * 32 * 2 * 4;
  EXPECT_EQ(bytes_of({.tp = 2}, Dimension::tp),
            (1 /* embedding */ + 1 /* head */ + 4 * (3 + 2) /* layers: forward, repeated, backward */) * 2 * half +
                statistics);
  ModelShare sharded;
  sharded.shards = 2;
  const int64_t elements = ParameterTable(grid_model().model, sharded).flat_elements();
  const int64_t weights = elements * 4 / 2;
  EXPECT_EQ(bytes_of({.dp = 2, .zero = 0}, Dimension::dp_cp),
            2 * ParameterTable(grid_model().model).flat_elements() * 4 / 2);
  EXPECT_EQ(bytes_of({.dp = 2, .zero = 1}, Dimension::dp_cp), 2 * weights);
  EXPECT_EQ(bytes_of({.dp = 2, .zero = 2}, Dimension::dp_cp), (2 + 1) * weights);
}

// Recomputation draws the same dropout masks; without a change of order not one bit may differ.
TEST(GridLayouts, B079_RecomputationDropsTheSameElements) {
  Config config = grid_model();
  config.model.attention_dropout = 0.1;
  config.model.hidden_dropout = 0.1;
  config.memory.recompute_granularity = Recompute::none;
  const Outcome kept = train(config, 1, documents(), 10);
  for (Recompute recompute : {Recompute::selective, Recompute::full}) {
    config.memory.recompute_granularity = recompute;
    expect_same_bits(train(config, 1, documents(), 10), kept, "recompute");
  }
}

TEST(GridLayouts, DropoutIsTheSameOnEveryLayoutAndOffInEvaluation) {
  Config config = grid_model();
  const Outcome without = train(config, 1, documents(), 1);
  config.model.attention_dropout = 0.3;
  config.model.hidden_dropout = 0.2;
  const Outcome with = train(config, 1, documents(), 1);
  EXPECT_GT(std::abs(*with.steps[0].totals.loss - *without.steps[0].totals.loss), 1e-4);
  expect_like_one_rank(config, {{.cp = 4},
                                {.cp = 4, .type = CpCommType::all_gather},
                                {.cp = 4, .type = CpCommType::a2a},
                                {.cp = 4, .type = CpCommType::a2a_p2p},
                                {.tp = 2},
                                {.tp = 4, .sp = true, .cp = 2},
                                {.pp = 2, .dp = 2}});
}

}  // namespace
}  // namespace farspan::testing_case
