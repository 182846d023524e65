// SPDX-License-Identifier: Apache-2.0
#include "optim/schedule.h"

#include <cmath>
#include <gtest/gtest.h>
#include <numbers>

#include "model/flops.h"

namespace farspan {
namespace {

OptimizerConfig cosine(double lr, double min_lr, int64_t warmup, int64_t decay) {
  OptimizerConfig config;
  config.lr = lr;
  config.min_lr = min_lr;
  config.lr_warmup_iters = warmup;
  config.lr_decay_iters = decay;
  return config;
}

// The rate is a function of the step alone, so a resumed run has the unbroken run's.
TEST(Schedule, B074_WarmUpAndCosineByStep) {
  const OptimizerConfig config = cosine(1e-3, 1e-4, 4, 20);
  for (int64_t step = 1; step <= 4; ++step)
    EXPECT_DOUBLE_EQ(learning_rate(config, step), 1e-3 * static_cast<double>(step) / 4);
  for (int64_t step = 5; step <= 20; ++step) {
    const double expected = 1e-4 + 4.5e-4 * (1 + std::cos(std::numbers::pi * static_cast<double>(step - 4) / 16));
    EXPECT_NEAR(learning_rate(config, step), expected, 1e-15) << step;
  }
  EXPECT_NEAR(learning_rate(config, 6), 9.65746e-4, 5e-10);
  EXPECT_DOUBLE_EQ(learning_rate(config, 100), 1e-4);
}

TEST(Schedule, B075_ANewScheduleHoldsFromTheNextStep) {
  const OptimizerConfig config = cosine(6e-4, 6e-5, 0, 20);
  EXPECT_NEAR(learning_rate(config, 11), 2.87763e-4, 5e-10);
  EXPECT_NEAR(learning_rate(config, 20), 6e-5, 1e-15);
}

TEST(Schedule, LinearAndConstant) {
  OptimizerConfig config = cosine(1e-3, 0, 0, 10);
  config.lr_decay_style = LrDecay::linear;
  EXPECT_NEAR(learning_rate(config, 5), 5e-4, 1e-15);
  config.lr_decay_style = LrDecay::constant;
  EXPECT_DOUBLE_EQ(learning_rate(config, 5), 1e-3);
}

// Attention counts visible pairs only: causal once, packed documents apart, the same whatever cp.
TEST(ModelFlops, B120_CountVisiblePairs) {
  ModelConfig model;
  model.num_layers = 1;
  model.hidden_size = 0;
  model.ffn_hidden_size = 0;
  model.vocab_size = 0;
  model.num_attention_heads = 8;
  model.num_query_groups = 8;
  model.kv_channels = 64;
  const auto forward = [&](int64_t pairs) { return model_flops(model, 0, pairs) / 3; };
  EXPECT_DOUBLE_EQ(forward(4096 * 4097 / 2), 17184063488.0);
  EXPECT_DOUBLE_EQ(forward(4 * (1024 * 1025 / 2)), 4299161600.0);
}

TEST(ModelFlops, MatmulParametersCountATiedHeadOnce) {
  ModelConfig model;
  model.num_layers = 2;
  model.hidden_size = 32;
  model.ffn_hidden_size = 64;
  model.vocab_size = 257;
  model.num_attention_heads = 4;
  model.num_query_groups = 2;
  model.kv_channels = 8;
  const int64_t layer = (4 + 2 * 2) * 8 * 32 + 32 * 32 + 3 * 32 * 64;
  EXPECT_EQ(matmul_parameters(model), 2 * layer + 257 * 32);
}

}  // namespace
}  // namespace farspan
