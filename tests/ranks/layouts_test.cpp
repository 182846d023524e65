// SPDX-License-Identifier: Apache-2.0
// Invariant 1 (design: exact): any layout gives one rank's loss, gradient norm, every gradient and the updated weights.
#include "tests/ranks/training_case.h"

namespace farspan::testing_case {
namespace {

struct Case {
  std::string name;
  Config config;
  std::shared_ptr<const Dataset> dataset;
};

std::shared_ptr<const Dataset> rows(std::vector<std::vector<int64_t>> lengths, bool cross = false) {
  return std::make_shared<GivenRows>(std::move(lengths), 257, cross);
}

Case causal() { return {"causal", model_m(48), one_document_rows(2, 48)}; }

Case window() {
  Case result = {"window", model_m(48), one_document_rows(2, 48)};
  result.config.model.window_size = {7};
  return result;
}

Case documents() { return {"documents", model_m(40), rows({{1, 2, 5, 11, 21}, {17, 23}})}; }

Case padding() { return {"padding", model_m(40), rows({{3, 2}, {29}})}; }

Case unmasked_documents() {
  Case result = {"unmasked documents", model_m(40), rows({{1, 2, 5, 11, 21}, {17, 23}}, true)};
  result.config.data.document_mask = false;
  result.config.data.reset_position_ids = false;
  return result;
}

Case twelve_heads_of_ten() {
  Case result = {"12 heads over 3, head size 10", model_m(26), one_document_rows(2, 26)};
  result.config.model.hidden_size = 24;
  result.config.model.num_attention_heads = 12;
  result.config.model.num_query_groups = 3;
  result.config.model.kv_channels = 10;
  return result;
}

Case qk_norm_and_bias() {
  Case result = {"q/k norm, bias, tied, interleaved", model_m(30), rows({{30}, {11, 19}})};
  result.config.model.qk_layernorm = true;
  result.config.model.add_qkv_bias = true;
  result.config.model.untie_embeddings_and_output_weights = false;
  result.config.model.rotary_interleaved = true;
  return result;
}

void compare_layouts(Case test, const std::vector<int64_t>& cp_sizes) {
  test.config.training.global_batch_size = 2;
  const Outcome one = train(with_cp(test.config, 1), 1, test.dataset, 2);
  for (int64_t cp : cp_sizes) {
    for (CpCommType type : {CpCommType::p2p, CpCommType::all_gather}) {
      const std::string what =
          test.name + ", cp " + std::to_string(cp) + (type == CpCommType::p2p ? " p2p" : " all_gather");
      expect_same_training(train(with_cp(test.config, cp, type), static_cast<int>(cp), test.dataset, 2), one, what);
    }
  }
}

TEST(Layouts, ExactForEveryMaskAndRankCount) {
  for (const Case& test :
       {causal(), window(), documents(), padding(), unmasked_documents(), twelve_heads_of_ten(), qk_norm_and_bias()})
    compare_layouts(test, kThreadSanitizer ? std::vector<int64_t>{3} : std::vector<int64_t>{2, 3, 4, 8});
}

TEST(Layouts, B001_OddLengthsAreExact) {
  compare_layouts({"S=10", model_m(10), one_document_rows(2, 10)}, {4});
  compare_layouts({"S=5, fewer tokens than chunks", model_m(5), one_document_rows(2, 5)}, {4, 8});
  constexpr int64_t kLong = kThreadSanitizer ? 299 : 2999;
  Case large = {"long and odd", model_m(kLong), one_document_rows(2, kLong)};
  large.config.model.num_layers = 1;
  compare_layouts(large, {4});
}

TEST(Layouts, ContiguousLayoutIsExact) {
  Case test = documents();
  test.config.parallel.cp_layout = CpLayout::contiguous;
  compare_layouts(test, {2, 3});
}

TEST(Layouts, B055_SameBatchInEveryMixOfDataAndContextParallelRanks) {
  Config config = model_m(16);
  config.optimizer.lr = 1;
  config.training.global_batch_size = 4;
  const auto dataset = one_document_rows(4, 16);
  const Outcome one = train(config, 1, dataset);
  for (int64_t cp : {1, 2, 4})
    expect_same_training(train(with_cp(config, cp), 4, dataset), one, "cp " + std::to_string(cp));
}

TEST(Layouts, B021_GroupsSmallerThanTheWorld) {
  Config config = model_m(16);
  config.training.global_batch_size = 4;
  const auto dataset = one_document_rows(8, 16);
  const Outcome one = train(config, 1, dataset, 2);
  for (CpCommType type : {CpCommType::p2p, CpCommType::all_gather})
    expect_same_training(train(with_cp(config, 2, type), 4, dataset, 2), one, "dp 2, cp 2");
}

TEST(Layouts, B066_AdamWUnderDataParallelismHasTheSameNorm) {
  Config config = model_m(16);
  config.optimizer.optimizer = OptimizerKind::adamw;
  config.optimizer.lr = 1e-3;
  config.training.global_batch_size = 4;
  const auto dataset = one_document_rows(4, 16);
  const Outcome one = train(config, 1, dataset);
  const Outcome four = train(config, 4, dataset);
  EXPECT_NEAR(four.gradient_norm / one.gradient_norm, 1, kSignalTolerance);
}

TEST(Layouts, B016_GradientErrorDoesNotGrowWithDepth) {
  Config config = model_m(32);
  config.model.num_layers = 6;
  const auto dataset = one_document_rows(1, 32);
  const Outcome one = train(config, 1, dataset);
  const Outcome two = train(with_cp(config, 2), 2, dataset);
  for (const Parameter& parameter : one.table->parameters()) {
    double largest = 0;
    double difference = 0;
    for (int64_t i = parameter.offset; i < parameter.offset + parameter.shape.numel(); ++i) {
      const size_t at = static_cast<size_t>(i);
      largest = std::max<double>(largest, std::abs(one.gradients[at]));
      difference = std::max<double>(difference, std::abs(one.gradients[at] - two.gradients[at]));
    }
    EXPECT_LE(difference, kSignalTolerance * largest) << parameter.name;
  }
}

TEST(Layouts, B069_ReplicatedWeightsStayEqualBitForBit) {
  Config config = model_m(24);
  config.optimizer.optimizer = OptimizerKind::adamw;
  config.optimizer.lr = 1e-2;
  config.training.global_batch_size = 2;
  const Outcome outcome = train(with_cp(config, 2), 4, one_document_rows(6, 24), 5);
  EXPECT_TRUE(outcome.ranks_agree);
}

TEST(Layouts, B070_TheStartDoesNotDependOnTheLayout) {
  Config config = model_m(16);
  config.training.global_batch_size = 2;
  config.optimizer.lr = 0;
  const auto dataset = one_document_rows(2, 16);
  const Outcome one = train(config, 1, dataset);
  EXPECT_EQ(train(with_cp(config, 2), 2, dataset).weights, one.weights);
  EXPECT_EQ(train(config, 2, dataset).weights, one.weights);
}

// Rank 0 holds positions 0..3 and 28..31: beyond its own length of 8.
TEST(Layouts, B051_PositionsBeyondTheLocalLength) {
  compare_layouts({"S=32", model_m(32), one_document_rows(2, 32)}, {4});
}

TEST(Layouts, B047_LossAtZigzagPositionsEqualsOneRank) {
  const auto dataset = one_document_rows(1, 8);
  const Outcome one = train(model_m(8), 1, dataset);
  const Outcome two = train(with_cp(model_m(8), 2), 2, dataset);
  EXPECT_NEAR(*two.steps[0].totals.loss, *one.steps[0].totals.loss, 1e-6);
}

// bf16 rounds activations once per op, so each layout is that far from fp32 whatever its rank count; the distance must
// not grow with it. The 1.5 leaves room for rounding that falls differently.
TEST(Layouts, B018_Bf16ErrorDoesNotGrowWithTheRankCount) {
  Config config = model_m(64);
  config.model.num_layers = 4;
  const auto dataset = one_document_rows(1, 64);
  const Outcome exact = train(config, 1, dataset);
  config.training.precision = Precision::bf16;
  const auto error = [&](int64_t cp, CpCommType type) {
    const Outcome outcome = train(with_cp(config, cp, type), static_cast<int>(cp), dataset);
    double sum = 0;
    double signal = 0;
    for (size_t i = 0; i < exact.gradients.size(); ++i) {
      const double difference = outcome.gradients[i] - exact.gradients[i];
      sum += difference * difference;
      signal += static_cast<double>(exact.gradients[i]) * exact.gradients[i];
    }
    return std::sqrt(sum / signal);
  };
  const double one = error(1, CpCommType::p2p);
  EXPECT_GT(one, 0);
  EXPECT_LT(one, 2e-2);
  EXPECT_LE(error(8, CpCommType::p2p), 1.5 * one);
  EXPECT_LE(error(8, CpCommType::all_gather), 1.5 * one);
}

}  // namespace
}  // namespace farspan::testing_case
