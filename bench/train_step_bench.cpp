// SPDX-License-Identifier: Apache-2.0
// A whole training step: 12 layers of 768 at 2048 tokens, on one rank with all cores. Counters: tokens per second,
// model TFLOP/s (recomputation not counted), and the share of the step spent inside GEMM, attention and memory-bound
// ops; what is left is outside any op.
#include <array>
#include <benchmark/benchmark.h>
#include <chrono>
#include <numeric>

#include "base/philox.h"
#include "model/flops.h"
#include "train/job.h"

namespace farspan {
namespace {

constexpr int64_t kTokens = 2048;

// One row of random bytes, over and over.
class RandomRow : public Dataset {
 public:
  int64_t rows(Split split) const override { return split == Split::train ? 1 : 0; }
  Row row(Split, int64_t) const override {
    return {.id = 0, .length = kTokens, .documents = {Span{0, kTokens}}, .targets = kTokens};
  }
  void read(const Row&, Span span, std::span<int32_t> tokens, std::span<int32_t> labels) const override {
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = token(span.begin + static_cast<int64_t>(i));
    for (size_t i = 0; i < labels.size(); ++i) labels[i] = token(span.begin + static_cast<int64_t>(i) + 1);
  }
  int64_t vocab_size() const override { return 257; }
  int64_t total_tokens() const override { return kTokens; }
  int64_t documents() const override { return 1; }
  std::string identity() const override { return "random row"; }
  std::string summary() const override { return "random row"; }

 private:
  static int32_t token(int64_t at) {
    return static_cast<int32_t>(257 * Philox(1, "bench").uniform(static_cast<uint64_t>(at)));
  }
};

Config twelve_layers(Precision precision, Recompute recompute) {
  Config config;
  config.model.num_layers = 12;
  config.model.hidden_size = 768;
  config.model.ffn_hidden_size = 2048;
  config.model.num_attention_heads = 12;
  config.model.vocab_size = 257;
  config.data.seq_length = kTokens;
  config.data.path = {"unused"};
  config.training.precision = precision;
  config.training.global_batch_size = 1;
  config.memory.recompute_granularity = recompute;
  return config;
}

class ClassSeconds : public OpObserver {
 public:
  void on_op(const OpCost& cost, OpTime time) override { seconds[static_cast<size_t>(cost.op_class)] += time.seconds; }
  std::array<double, kOpClasses> seconds{};
};

void train_step(benchmark::State& state, Precision precision, Recompute recompute) {
  const Job job = make_job(twelve_layers(precision, recompute), 1, RunKind::train, std::make_shared<RandomRow>());
  run_job(job, [&](RankTrainer& trainer, World&) {
    trainer.initialise_weights();
    trainer.train_step(1, false);  // warms the caches of primitives
    ClassSeconds observer;
    trainer.context().device->observe(&observer);
    double total = 0;
    double flops = 0;
    int64_t step = 1;
    for (auto _ : state) {
      const auto start = std::chrono::steady_clock::now();
      const StepReport report = trainer.train_step(++step, false);
      total += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      flops += model_flops(job.config.model, report.totals.tokens, report.totals.layer_pairs);
    }
    trainer.context().device->observe(nullptr);
    state.counters["tokens/s"] = static_cast<double>(kTokens * state.iterations()) / total;
    state.counters["model TFLOP/s"] = flops / total / 1e12;
    state.counters["share GEMM"] = observer.seconds[static_cast<size_t>(OpClass::gemm)] / total;
    state.counters["share attention"] = observer.seconds[static_cast<size_t>(OpClass::attention)] / total;
    state.counters["share memory"] = observer.seconds[static_cast<size_t>(OpClass::memory)] / total;
  });
}

BENCHMARK_CAPTURE(train_step, f32_selective, Precision::fp32, Recompute::selective)
    ->Unit(benchmark::kMillisecond)
    ->Iterations(3);
BENCHMARK_CAPTURE(train_step, f32_none, Precision::fp32, Recompute::none)->Unit(benchmark::kMillisecond)->Iterations(3);
BENCHMARK_CAPTURE(train_step, bf16_selective, Precision::bf16, Recompute::selective)
    ->Unit(benchmark::kMillisecond)
    ->Iterations(3);

}  // namespace
}  // namespace farspan

BENCHMARK_MAIN();
