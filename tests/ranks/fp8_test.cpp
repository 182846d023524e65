// SPDX-License-Identifier: Apache-2.0
// precision fp8: the layers' products of operands in 8 bits, on every layout.
#include <cmath>
#include <gmock/gmock.h>

#include "config/validate.h"
#include "plan/step_plan.h"
#include "tests/ranks/training_case.h"

namespace farspan::testing_case {
namespace {

// Widths in multiples of 16 on two tensor-parallel ranks too.
Config fp8_model(int64_t seq_length) {
  Config config = model_m(seq_length);
  config.model.kv_channels = 16;
  config.training.precision = Precision::fp8;
  return config;
}

double distance(const std::vector<float>& found, const std::vector<float>& expected) {
  double squares = 0, signal = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double difference = static_cast<double>(found[i]) - static_cast<double>(expected[i]);
    squares += difference * difference;
    signal += static_cast<double>(expected[i]) * static_cast<double>(expected[i]);
  }
  return std::sqrt(squares / signal);
}

// Rounding to 4 or 3 significant bits moves a gradient by a few per cent (2.6 here), and a loss hardly.
TEST(Fp8Training, GradientsAreNearThoseOfFp32) {
  Config config = fp8_model(64);
  const auto dataset = one_document_rows(1, 64);
  const Outcome fp8 = train(config, 1, dataset);
  config.training.precision = Precision::fp32;
  const Outcome exact = train(config, 1, dataset);
  EXPECT_NEAR(*fp8.steps[0].totals.loss, *exact.steps[0].totals.loss, 1e-2 * *exact.steps[0].totals.loss);
  const double far = distance(fp8.gradients, exact.gradients);
  EXPECT_GT(far, 1e-2) << "nothing was rounded to 8 bits";
  EXPECT_LT(far, 0.1);
}

// Where a layout gives products other operands (tensor parallelism rounds partial sums of other parts, 1.4 % here) or
// attention another order, some roundings fall otherwise and are no farther from one rank than rounding itself is from
// fp32. Where every product is the same, so is the gradient.
TEST(Fp8Training, EveryLayoutIsNearOneRank) {
  Config config = fp8_model(64);
  config.training.global_batch_size = 2;
  const auto dataset = one_document_rows(2, 64);
  const Outcome one = train(config, 1, dataset);
  constexpr double kRounding = 3e-2, kSame = 1e-5;
  struct Layout {
    const char* name;
    int ranks;
    double allowed;
    void (*set)(ParallelConfig&);
  };
  for (const Layout& layout :
       {Layout{"cp 2", 2, kRounding, [](ParallelConfig& p) { p.context_parallel_size = 2; }},
        Layout{"tp 2", 2, kRounding, [](ParallelConfig& p) { p.tensor_model_parallel_size = 2; }},
        Layout{"tp 2 with sequence parallelism", 2, kRounding,
               [](ParallelConfig& p) { p.tensor_model_parallel_size = 2, p.sequence_parallel = true; }},
        Layout{"pp 2", 2, kSame, [](ParallelConfig& p) { p.pipeline_model_parallel_size = 2; }},
        Layout{"dp 2, ZeRO 3", 2, kSame, [](ParallelConfig& p) { p.zero_stage = 3; }}}) {
    Config cut = config;
    layout.set(cut.parallel);
    const Outcome outcome = train(cut, layout.ranks, dataset);
    EXPECT_NEAR(*outcome.steps[0].totals.loss, *one.steps[0].totals.loss, 2e-3) << layout.name;
    EXPECT_LT(distance(outcome.gradients, one.gradients), layout.allowed) << layout.name;
    for (size_t rank = 0; rank < outcome.plans.size(); ++rank)
      EXPECT_EQ(outcome.highest_bytes[rank], outcome.plans[rank].peak_bytes) << layout.name << " rank " << rank;
  }
}

// Weights are measured once between two updates. After one that makes them many times as large, what was measured
// before would give other scales than measuring them now.
TEST(Fp8Training, ScalesFollowTheWeights) {
  Config config = fp8_model(64);
  config.training.global_batch_size = 2;
  config.optimizer.lr = 50;
  const auto dataset = one_document_rows(2, 64);
  for (const int64_t zero_stage : {0, 1, 3}) {
    config.parallel.zero_stage = zero_stage;
    run_job(training_job(config, 2, dataset), [&](RankTrainer& trainer, World&) {
      trainer.initialise_weights();
      const auto loss = [&] { return *trainer.evaluate(Split::train, 1).loss; };
      const double before = loss();
      trainer.train_step(1, false);
      const double after = loss();
      trainer.store().distribute_weights();  // the same ones, not measured yet
      EXPECT_EQ(after, loss()) << "ZeRO " << zero_stage;
      EXPECT_GT(std::abs(after - before), 0.1) << "the weights hardly changed";
    });
  }
}

TEST(Fp8Training, EveryRecomputePolicyGivesTheSameBits) {
  Config config = with_cp(fp8_model(44), 2);
  config.memory.mlp_tile_tokens = 8;
  const auto dataset = one_document_rows(1, 44);
  config.memory.recompute_granularity = Recompute::none;
  const Outcome none = train(config, 2, dataset, 2);
  for (Recompute recompute : {Recompute::selective, Recompute::full}) {
    config.memory.recompute_granularity = recompute;
    expect_same_bits(train(config, 2, dataset, 2), none, recompute == Recompute::full ? "full" : "selective");
  }
}

// What the products of a step cost is told apart from those in bf16: the head's stay there.
TEST(Fp8Training, OnlyTheLayersProductsAreInFp8) {
  Config config = fp8_model(64);
  const auto flops = [&](OpClass op_class) {
    const Job job = training_job(config, 1, one_document_rows(1, 64));
    return job.records[0].micro_batch.ops[static_cast<size_t>(op_class)].flops;
  };
  const double layers = flops(OpClass::gemm_fp8), head = flops(OpClass::gemm);
  config.training.precision = Precision::bf16;
  EXPECT_EQ(flops(OpClass::gemm_fp8), 0);
  EXPECT_DOUBLE_EQ(flops(OpClass::gemm), layers + head);
  EXPECT_DOUBLE_EQ(head, 3.0 * 2 * 64 * 257 * 32);
}

TEST(Fp8Training, WidthsThatMatrixUnitsCannotReadAreRefused) {
  const auto refusal = [](auto change) -> std::string {
    Config config = fp8_model(64);
    change(config);
    try {
      resolve(config, 1);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  using ::testing::HasSubstr;
  EXPECT_EQ(refusal([](Config&) {}), "");
  EXPECT_THAT(refusal([](Config& c) { c.model.hidden_size = 40; }),
              AllOf(HasSubstr("multiples of 16"), HasSubstr("hidden_size 40"), HasSubstr("32 or 48")));
  EXPECT_THAT(refusal([](Config& c) { c.model.ffn_hidden_size = 100; }),
              AllOf(HasSubstr("ffn_hidden_size, 100"), HasSubstr("96 or 112")));
  EXPECT_THAT(refusal([](Config& c) { c.model.kv_channels = 10; }), HasSubstr("query heads times kv_channels, 40"));
}

}  // namespace
}  // namespace farspan::testing_case
