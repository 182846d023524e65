// SPDX-License-Identifier: Apache-2.0
// What the dry device records of a rank is what the rank does, whether the recording ran every call or repeated one
// that it knew, and whether the rank was recorded or taken for another.
#include <mutex>

#include "plan/step_plan.h"
#include "tests/ranks/training_case.h"

namespace farspan::testing_case {
namespace {

class OpCounter : public OpObserver {
 public:
  void on_op(const OpCost& cost, OpTime) override {
    OpTotals& totals = ops[static_cast<size_t>(cost.op_class)];
    totals.flops += cost.flops;
    totals.bytes += cost.bytes;
    ++totals.calls;
  }
  std::array<OpTotals, kOpClasses> ops{};
};

constexpr Dimension kPlanned[] = {Dimension::tp, Dimension::cp, Dimension::dp, Dimension::pp, Dimension::dp_cp};

// Four layers in two windows: calls that are alike and calls that are not. One micro-batch: later ones add to gradients
// that the first one writes, and a record is of the first.
Config several_layers(int64_t seq_length) {
  Config config = model_m(seq_length);
  config.model.num_layers = 4;
  config.model.window_size = {0, 9, 0, 9};
  config.training.global_batch_size = 1;
  return config;
}

void expect_recorded_step(const Config& config, int ranks) {
  const Job job = training_job(config, ranks, one_document_rows(8, config.data.seq_length));
  std::mutex mutex;
  run_job(job, [&](RankTrainer& trainer, World&) {
    RankContext& context = trainer.context();
    trainer.initialise_weights();
    context.reset_traffic();
    OpCounter counter;
    context.device->observe(&counter);
    trainer.train_step(1, false);
    if (context.device->on_cuda()) context.device->report_timings();
    context.device->observe(nullptr);
    const std::lock_guard lock(mutex);
    SCOPED_TRACE(fmt::format("rank {}", context.rank));
    const RankRecord& record = job.records[static_cast<size_t>(context.rank)];
    const auto planned = [&](const auto& value) {
      return static_cast<decltype(value(record.update))>(job.sizes.micro_batches) * value(record.micro_batch) +
             value(record.update);
    };
    for (size_t op = 0; op < kOpClasses; ++op) {
      EXPECT_EQ(counter.ops[op].flops, planned([&](const PhaseCost& cost) { return cost.ops[op].flops; }));
      EXPECT_EQ(counter.ops[op].bytes, planned([&](const PhaseCost& cost) { return cost.ops[op].bytes; }));
      EXPECT_EQ(counter.ops[op].calls, planned([&](const PhaseCost& cost) { return cost.ops[op].calls; }));
    }
    for (Dimension dimension : kPlanned) {
      const size_t at = static_cast<size_t>(dimension);
      const Traffic moved = context.traffic(dimension);
      EXPECT_EQ(moved.bytes_sent, planned([&](const PhaseCost& cost) { return cost.traffic[at].bytes_sent; }));
      EXPECT_EQ(moved.bytes_received, planned([&](const PhaseCost& cost) { return cost.traffic[at].bytes_received; }));
      EXPECT_EQ(moved.calls, planned([&](const PhaseCost& cost) { return cost.traffic[at].calls; }));
    }
  });
}

TEST(Record, CostsAreThoseOfAStep) {
  for (CpCommType type : {CpCommType::p2p, CpCommType::all_gather, CpCommType::a2a}) {
    SCOPED_TRACE(static_cast<int>(type));
    expect_recorded_step(with_cp(several_layers(40), 2, type), 2);
  }
  Config config = with_cp(several_layers(48), 4, CpCommType::a2a_p2p);
  config.parallel.hierarchical_context_parallel_sizes = {2, 2};
  expect_recorded_step(config, 4);
}

TEST(Record, CostsAreThoseOfAStepOfAPipeline) {
  Config config = with_cp(several_layers(40), 2);
  config.parallel.pipeline_model_parallel_size = 2;
  config.parallel.zero_stage = 1;
  config.model.untie_embeddings_and_output_weights = false;
  config.memory.recompute_granularity = Recompute::full;
  expect_recorded_step(config, 4);
}

// A rank that was taken for another would have recorded the same itself.
TEST(Record, RanksTakenForOthersAreAlike) {
  for (int64_t zero_stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(zero_stage);
    Config config = with_cp(several_layers(40), 2);
    config.parallel.tensor_model_parallel_size = 2;
    config.parallel.sequence_parallel = true;
    config.parallel.zero_stage = zero_stage;
    config.model.vocab_size = 256;
    config.model.hidden_size = 128;
    config.model.ffn_hidden_size = 256;
    config.model.kv_channels = 32;
    config.training.global_batch_size = 4;
    const Job job = make_job(config, 16, RunKind::train, JobData::none);
    const std::vector<int> alike = ranks_alike(job.config, job.sizes);
    ASSERT_EQ(std::ssize(alike), 16);
    int taken = 0;
    for (int rank = 0; rank < 16; ++rank) {
      SCOPED_TRACE(rank);
      taken += alike[static_cast<size_t>(rank)] != rank;
      SharedPlans plans;
      const RankRecord own = record_rank(job.config, job.sizes, rank, RunKind::train, &plans);
      plans.lay_out(1);
      const RankRecord& used = job.records[static_cast<size_t>(rank)];
      EXPECT_EQ(own.micro_batch, used.micro_batch);
      // What several ranks hold alike, whole or in tp, counts in the gradient's norm on the first of them.
      if (zero_stage > 0 && rank % 2 == 0) {
        EXPECT_EQ(own.update, used.update);
      }
      EXPECT_TRUE(same_recording(*own.memory, *used.memory));
      EXPECT_EQ(own.memory->peak_bytes, used.memory->peak_bytes);
    }
    // Of 16 = tp 2, cp 2, dp 4. Shards without a norm or an end of a unit are alike.
    EXPECT_GE(taken, zero_stage == 0 ? 14 : 9);
  }
}

// Thousands of ranks in seconds: what ranks have in common is recorded once, and what layers have.
TEST(Record, AJobOfManyRanksIsPlannedInSeconds) {
  Config config = model_m(4096);
  config.model.num_layers = 64;
  config.parallel.tensor_model_parallel_size = 2;
  config.parallel.sequence_parallel = true;
  config.parallel.context_parallel_size = 16;
  config.parallel.pipeline_model_parallel_size = 8;
  config.parallel.zero_stage = 1;
  config.training.global_batch_size = 128;
  const Job job = make_job(config, 2048, RunKind::train, JobData::none);
  ASSERT_EQ(job.records.size(), 2048u);
  EXPECT_EQ(job.records[0].memory, job.records[1].memory) << "one plan for both, not two that are equal";
}

}  // namespace
}  // namespace farspan::testing_case
