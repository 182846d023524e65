// SPDX-License-Identifier: Apache-2.0
// Invariant 4 (design: no surprise memory) and the policies that trade memory for work.
#include "plan/step_plan.h"
#include "tests/ranks/training_case.h"

namespace farspan::testing_case {
namespace {

int64_t largest(const MemoryPlan& plan, Purpose purpose) {
  return plan.largest_by_purpose[static_cast<size_t>(purpose)];
}

TEST(MemoryPlan, HighestByteInUseEqualsThePlanOnEveryRank) {
  for (Precision precision : {Precision::fp32, Precision::bf16}) {
    for (Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
      for (CpCommType type : {CpCommType::p2p, CpCommType::all_gather}) {
        for (int64_t cp : {1, 2, 3, 4}) {
          Config config = with_cp(model_m(52), cp, type);
          config.training.precision = precision;
          config.memory.recompute_granularity = recompute;
          config.memory.mlp_tile_tokens = 8;
          config.memory.loss_tile_tokens = 16;
          const Outcome outcome = train(config, static_cast<int>(cp), one_document_rows(1, 52), 2);
          for (size_t rank = 0; rank < outcome.plans.size(); ++rank)
            EXPECT_EQ(outcome.highest_bytes[rank], outcome.plans[rank].peak_bytes) << "cp " << cp << " rank " << rank;
        }
      }
    }
  }
}

TEST(MemoryPlan, EveryRecomputePolicyGivesTheSameBits) {
  Config config = with_cp(model_m(44), 2);
  config.training.global_batch_size = 2;
  config.memory.mlp_tile_tokens = 8;
  config.memory.loss_tile_tokens = 8;
  const auto dataset = std::make_shared<GivenRows>(std::vector<std::vector<int64_t>>{{11, 33}, {40}}, 257);
  for (Precision precision : {Precision::fp32, Precision::bf16}) {
    config.training.precision = precision;
    config.model.qk_layernorm = precision == Precision::bf16;
    config.memory.recompute_granularity = Recompute::none;
    const Outcome none = train(config, 2, dataset, 2);
    config.memory.recompute_granularity = Recompute::full;
    expect_same_bits(train(config, 2, dataset, 2), none, "full");
    config.memory.recompute_granularity = Recompute::selective;
    expect_same_bits(train(config, 2, dataset, 2), none, "selective");
    for (const char* module : {"layernorm", "qkv", "attn_proj", "mlp"}) {
      config.memory.recompute_modules = {module};
      expect_same_bits(train(config, 2, dataset, 2), none, module);
    }
    config.memory.recompute_modules.clear();
  }
}

TEST(MemoryPlan, EveryTileSizeGivesTheSameTraining) {
  Config config = model_m(40);
  const auto dataset = one_document_rows(1, 40);
  config.memory.mlp_tile_tokens = 40;
  config.memory.loss_tile_tokens = 40;
  const Outcome whole = train(config, 1, dataset);
  for (int64_t tile : {1, 7, 8, 39}) {
    config.memory.mlp_tile_tokens = tile;
    config.memory.loss_tile_tokens = tile;
    expect_same_training(train(config, 1, dataset), whole, "tiles of " + std::to_string(tile));
  }
}

TEST(MemoryPlan, KeptBytesFallAsOneOverCp) {
  const auto kept = [](int64_t cp) {
    const Job job =
        make_job(with_cp(model_m(4096), cp), static_cast<int>(cp), RunKind::train, one_document_rows(1, 4096));
    return largest(*job.records[0].memory, Purpose::kept);
  };
  for (int64_t cp : {2, 4, 8}) EXPECT_EQ(kept(cp) * cp, kept(1)) << cp;
}

TEST(MemoryPlan, TheRingsLiveBytesDoNotDependOnCp) {
  const auto ring = [](int64_t cp) {
    const int64_t length = 2048 * cp;
    const Job job =
        make_job(with_cp(model_m(length), cp), static_cast<int>(cp), RunKind::train, one_document_rows(1, length));
    return largest(*job.records[0].memory, Purpose::communication);
  };
  EXPECT_GT(ring(2), 0);
  EXPECT_EQ(ring(8), ring(4));
  // On a GPU pieces are larger, and where two ranks exchange one of them only, one buffer receives it.
  if (test::testing_cuda())
    EXPECT_LE(ring(2), ring(4));
  else
    EXPECT_EQ(ring(2), ring(4));
}

TEST(MemoryPlan, PoliciesOrderAsTheyShould) {
  const auto peak = [](Recompute recompute) {
    Config config = model_m(2048);
    config.model.num_layers = 8;
    config.memory.recompute_granularity = recompute;
    return make_job(config, 1, RunKind::train, one_document_rows(1, 2048)).records[0].memory->peak_bytes;
  };
  EXPECT_LT(peak(Recompute::full), peak(Recompute::selective));
  EXPECT_LT(peak(Recompute::selective), peak(Recompute::none));
}

TEST(MemoryPlan, LayoutWastesLittleBeyondTheLiveBytes) {
  Config config = model_m(2048);
  config.model.num_layers = 6;
  const Job job = make_job(with_cp(config, 4), 4, RunKind::train, one_document_rows(1, 2048));
  for (const PlannedProgram& program : job.records[0].memory->programs)
    EXPECT_LE(program.end, program.live_peak + program.live_peak / 20) << program.name;
}

TEST(MemoryPlan, B108_EvaluationNeedsNoMoreThanTraining) {
  Config config = model_m(1024);
  config.model.vocab_size = 32000;
  config.memory.loss_tile_tokens = 512;
  const Job job = make_job(config, 1, RunKind::train, one_document_rows(1, 1024));
  int64_t train_end = 0;
  int64_t evaluate_end = 0;
  for (const PlannedProgram& program : job.records[0].memory->programs) {
    (program.name == "train" ? train_end : evaluate_end) = program.end;
    for (const PlannedBuffer& buffer : program.buffers) EXPECT_LT(buffer.bytes, 1024 * 32000 * 4) << buffer.name;
  }
  EXPECT_GT(evaluate_end, 0);
  EXPECT_LE(evaluate_end, train_end);
}

TEST(MemoryPlan, B109_MicroBatchesDoNotAddUp) {
  Config config = model_m(64);
  const auto peak = [&](int64_t batch) {
    config.training.global_batch_size = batch;
    return make_job(config, 1, RunKind::train, one_document_rows(16, 64)).records[0].memory->peak_bytes;
  };
  EXPECT_EQ(peak(16), peak(2));
  EXPECT_LT(peak(1), peak(2)) << "gradients of one micro-batch come as kept activations go";
}

// 16 layers that each keep more than their gradient: at the peak there are the gradients of the head and of a layer.
TEST(MemoryPlan, GradientsOfOnePassAndKeptActivationsDoNotAddUp) {
  Config config = model_m(1024);
  config.model.num_layers = 16;
  for (Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
    config.memory.recompute_granularity = recompute;
    for (int64_t pipeline : {1, 2}) {
      for (int64_t zero_stage : {0, 1}) {
        SCOPED_TRACE(fmt::format("recompute {}, pp {}, ZeRO {}", static_cast<int>(recompute), pipeline, zero_stage));
        config.parallel.pipeline_model_parallel_size = pipeline;
        config.parallel.zero_stage = zero_stage;
        const int64_t ranks = 2 * pipeline;  // dp 2
        // Several micro-batches are several passes, but in a pipeline.
        const auto plan = [&](int64_t micro_batches) {
          config.training.global_batch_size = 2 * micro_batches;
          const Job job = make_job(config, static_cast<int>(ranks), RunKind::train, JobData::none);
          return *job.records[0].memory;
        };
        const MemoryPlan one = plan(1);
        const int64_t gradients = largest(one, Purpose::gradients);
        const int64_t shard = zero_stage == 1 ? gradients / 3 : 0;  // of the whole and a half
        const int64_t layers = 16 / pipeline;
        EXPECT_EQ(one.peak_program, "train");
        EXPECT_LT(one.by_purpose[static_cast<size_t>(Purpose::gradients)] - shard, (gradients - shard) * 4 / layers);
        EXPECT_LE(one.programs.front().end, one.programs.front().live_peak * 101 / 100);
        if (pipeline == 1) {
          EXPECT_EQ(largest(plan(2), Purpose::gradients), gradients);
          EXPECT_GT(plan(2).peak_bytes, one.peak_bytes + (gradients - shard) / 2);
        }
      }
    }
  }
}

// One allocation of a size that no document decides: nothing can be split, and nothing grows.
TEST(MemoryPlan, B110_StepsOfDocumentsOfAnyLengthUseTheSameMemory) {
  const auto highest = [](const std::vector<std::vector<int64_t>>& rows) {
    const Config config = with_cp(model_m(512), 2);
    const Outcome outcome = train(config, 2, std::make_shared<GivenRows>(rows, 257), std::ssize(rows));
    for (size_t rank = 0; rank < 2; ++rank) EXPECT_EQ(outcome.highest_bytes[rank], outcome.plans[rank].peak_bytes);
    return outcome.highest_bytes;
  };
  EXPECT_EQ(highest({{512}, {31}, {256, 256}, {1, 40, 300}, {64, 64, 64}, {512}, {8}, {511, 1}}), highest({{512}}));
}

TEST(MemoryPlan, APlanLargerThanTheLimitIsRefusedWithTheNumbers) {
  Config config = model_m(64);
  config.memory.memory_limit = 1000;
  try {
    make_job(config, 1, RunKind::train, one_document_rows(1, 64));
    FAIL() << "nothing was thrown";
  } catch (const MemoryError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("the limit is 1000"));
  }
}

// parallel/context/context_attention.h: under a causal zigzag p2p moves three quarters of the keys and values that a
// plain ring would, (cp - 1) 2 s K D b a rank, and as much of their fp32 gradients. optim/parameter_store.h: gradients
// 2 bytes (n - 1) / n. Counted by the running ranks, by the dry ones, and by formula.
TEST(Bytes, CountersEqualTheFormulas) {
  for (const auto& [precision, b] : {std::pair{Precision::fp32, 4}, std::pair{Precision::bf16, 2}}) {
    Config config = with_cp(model_m(96), 4, CpCommType::p2p);
    config.training.precision = precision;
    const Job job = training_job(config, 4, one_document_rows(1, 96));
    std::array<Traffic, 4> cp{};
    std::array<Traffic, 4> sum{};
    run_job(job, [&](RankTrainer& trainer, World&) {
      trainer.initialise_weights();
      trainer.train_step(1, false);
      const size_t rank = static_cast<size_t>(trainer.context().rank);
      cp[rank] = trainer.context().traffic(Dimension::cp);
      sum[rank] = trainer.context().traffic(Dimension::dp_cp);
    });
    int64_t cp_received = 0;
    int64_t cp_sent = 0;
    int64_t gradients_received = 0;
    for (size_t rank = 0; rank < 4; ++rank) {
      const Traffic& dry = job.records[rank].micro_batch.traffic[static_cast<size_t>(Dimension::cp)];
      EXPECT_EQ(dry.bytes_received, cp[rank].bytes_received);
      EXPECT_EQ(dry.bytes_sent, cp[rank].bytes_sent);
      cp_received += cp[rank].bytes_received;
      cp_sent += cp[rank].bytes_sent;
      gradients_received += sum[rank].bytes_received;
    }
    const int64_t layers = 2;
    const int64_t key_value = 2 * (96 / 4) * 2 * 8;  // elements of a rank's keys and values
    const int64_t plain = 4 * 3 * (key_value * b + key_value * (b + 4));
    EXPECT_EQ(cp_received, layers * plain * 3 / 4);
    EXPECT_EQ(cp_sent, cp_received);
    const int64_t gradient_bytes = ParameterTable(job.config.model).flat_elements() * 4;
    EXPECT_EQ(gradients_received, 2 * 3 * gradient_bytes) << "all ranks together: 2 bytes (n - 1)";
  }
}

TEST(Repeatable, ThreadsOfARankChangeNoMoreThanRounding) {
  Config config = model_m(40);
  config.training.global_batch_size = 2;
  const auto dataset = one_document_rows(2, 40);
  expect_same_training(train(config, 1, dataset, 2, 3), train(config, 1, dataset, 2), "3 threads");
}

TEST(Repeatable, TheSameRunTwiceGivesTheSameBits) {
  Config config = with_cp(model_m(40), 4);
  config.optimizer.optimizer = OptimizerKind::adamw;
  const auto dataset = one_document_rows(3, 40);
  expect_same_bits(train(config, 4, dataset, 4), train(config, 4, dataset, 4), "twice");
}

}  // namespace
}  // namespace farspan::testing_case
