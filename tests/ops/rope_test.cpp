// SPDX-License-Identifier: Apache-2.0
#include "ops/rope.h"

#include <numbers>

#include "ops/ref/layers.h"
#include "tests/ops/operand.h"

namespace farspan {
namespace {

using test::expect_close;
using test::Operand;
using test::TestVector;

Tensor tensor_of(TestVector<int64_t>& positions) {
  return {positions.data(), DType::i64, Shape{static_cast<int64_t>(positions.size())}};
}

class RopeTest : public test::BothTypes {};

TEST_P(RopeTest, MatchesReferenceAndTurnsBack) {
  for (const RopeStyle style : {RopeStyle::half_split, RopeStyle::interleaved})
    for (const int64_t head_dim : {2, 10, 64, 96, 128, 600})
      for (const int64_t padding : {0, 9, 16}) {
        TestVector<int64_t> positions = {0, 1, 5, 131071, 17};
        const std::vector<double> frequencies = rope_inverse_frequencies({.head_dim = head_dim});
        Operand table(DType::f32, Shape{5, 2, head_dim / 2}), x(dtype(), Shape{5, 3, head_dim}, padding);
        x.random(1);
        const std::vector<double> before = x.values();
        const auto expected = ref::rope(x.matrix(), positions, frequencies, style, RopeDirection::forward);
        rope_table(device_, tensor_of(positions), frequencies, 1.0, table);
        rope_apply(device_, table, style, RopeDirection::forward, x);
        expect_close(x, expected, "forward");
        const auto back = ref::rope(x.matrix(), positions, frequencies, style, RopeDirection::backward);
        rope_apply(device_, table, style, RopeDirection::backward, x);
        expect_close(x, back, "backward");
        // Two roundings of the dtype lie between, the first of channels that may be larger than the one they turn into.
        expect_close(x.values(), before, 4 * test::tolerance(dtype()), "backward undoes forward");
      }
}

TEST_P(RopeTest, B053_PairingStyles) {
  TestVector<int64_t> positions = {1};
  Operand table(DType::f32, Shape{1, 2, 2}), x(dtype(), Shape{1, 1, 4});
  rope_table(device_, tensor_of(positions), rope_inverse_frequencies({.head_dim = 4}), 1.0, table);
  x.set({1, 0, 0, 0});
  rope_apply(device_, table, RopeStyle::half_split, RopeDirection::forward, x);
  expect_close(x.values(), {0.540302, 0, 0.841471, 0}, test::tolerance(dtype()), "half_split");
  x.set({1, 0, 0, 0});
  rope_apply(device_, table, RopeStyle::interleaved, RopeDirection::forward, x);
  expect_close(x.values(), {0.540302, 0.841471, 0, 0}, test::tolerance(dtype()), "interleaved");
}

TEST_P(RopeTest, B054_TurnsAlongTokensNotHeads) {
  TestVector<int64_t> positions = {0, 1, 2, 3, 4, 5, 6, 7};
  const int64_t heads = 4, dim = 8;
  Operand table(DType::f32, Shape{8, 2, dim / 2}), x(dtype(), Shape{8, heads, dim});
  x.set([&](int64_t i) { return 1.0 + static_cast<double>(i % dim); });
  const std::vector<double> before = x.values();
  rope_table(device_, tensor_of(positions), rope_inverse_frequencies({.head_dim = dim}), 1.0, table);
  rope_apply(device_, table, RopeStyle::half_split, RopeDirection::forward, x);
  const ref::Matrix turned = x.matrix();
  for (int64_t t = 0; t < 8; ++t)
    for (int64_t h = 1; h < heads; ++h)
      for (int64_t i = 0; i < dim; ++i) EXPECT_EQ(turned.at(t * heads + h, i), turned.at(t * heads, i));
  for (int64_t i = 0; i < dim; ++i) EXPECT_EQ(turned.at(0, i), before[static_cast<size_t>(i)]);
  for (int64_t t = 1; t < 8; ++t) EXPECT_NE(turned.at(t * heads, 0), turned.at((t - 1) * heads, 0));
}

INSTANTIATE_TEST_SUITE_P(Types, RopeTest, testing::Values(DType::f32, DType::bf16), test::type_name);

TEST(Rope, B050_AnglesKeepFullPrecision) {
  Device device(test::test_device_kind(), 1);
  TestVector<int64_t> positions = {257, 20011, 131071};
  const std::vector<double> frequencies = rope_inverse_frequencies({.head_dim = 64, .base = 10000});
  Operand table(DType::f32, Shape{3, 2, 32});
  rope_table(device, tensor_of(positions), frequencies, 1.0, table);
  const std::vector<double> entries = table.values();
  const auto cosine = [&](size_t row, size_t pair) { return entries[row * 64 + pair]; };
  const auto sine = [&](size_t row, size_t pair) { return entries[row * 64 + 32 + pair]; };
  EXPECT_NEAR(cosine(0, 0), 0.819306, 1e-6);
  EXPECT_NEAR(20011 * frequencies[3], 8438.5687, 1e-4);
  EXPECT_NEAR(cosine(1, 3), 0.968699, 1e-6);
  // Angle error against fp64, 131071 rad and below: one rounding of the table's entries, far under the 3e-2 asked for.
  for (size_t pair = 0; pair < 32; ++pair) {
    const double angle = 131071 * frequencies[pair];
    const double error = std::remainder(std::atan2(sine(2, pair), cosine(2, pair)) - angle, 2 * std::numbers::pi);
    EXPECT_LT(std::abs(error), 1.2e-7) << pair;
  }
}

TEST(Rope, ScalingFormulas) {
  const int64_t dim = 128;
  const RopeSpec plain{.head_dim = dim, .base = 500000};
  const auto base = rope_inverse_frequencies(plain);
  ASSERT_EQ(base.size(), 64u);
  EXPECT_EQ(base[0], 1.0);
  EXPECT_NEAR(base[1], std::pow(500000.0, -2.0 / 128), 1e-15);

  RopeSpec spec = plain;
  spec.factor = 8;
  spec.scaling = RopeSpec::Scaling::linear;
  for (size_t i = 0; i < 64; ++i) EXPECT_DOUBLE_EQ(rope_inverse_frequencies(spec)[i], base[i] / 8);
  EXPECT_EQ(rope_attention_factor(spec), 1.0);

  // ntk keeps the first pair and divides the last by exactly the factor.
  spec.scaling = RopeSpec::Scaling::ntk;
  EXPECT_EQ(rope_inverse_frequencies(spec)[0], 1.0);
  EXPECT_NEAR(rope_inverse_frequencies(spec)[63], base[63] / 8, 1e-12 * base[63]);

  // Llama 3.1: wavelengths under 8192 / 4 kept, over 8192 / 1 divided by 8, in between a mean.
  spec.scaling = RopeSpec::Scaling::llama3;
  spec.original_max_position = 8192;
  const auto llama3 = rope_inverse_frequencies(spec);
  int between = 0;
  for (size_t i = 0; i < 64; ++i) {
    const double wavelength = 2 * std::numbers::pi / base[i];
    if (wavelength < 2048) {
      EXPECT_EQ(llama3[i], base[i]);
    } else if (wavelength > 8192) {
      EXPECT_EQ(llama3[i], base[i] / 8);
    } else {
      ++between;
      const double smooth = (8192 / wavelength - 1) / 3;
      EXPECT_NEAR(llama3[i], ((1 - smooth) / 8 + smooth) * base[i], 1e-12 * base[i]);
    }
  }
  EXPECT_GE(between, 3);

  // YaRN: pairs that turn often are kept, pairs that hardly turn are divided, a straight ramp between.
  spec.scaling = RopeSpec::Scaling::yarn;
  spec.base = 10000;
  spec.factor = 4;
  spec.original_max_position = 4096;
  const auto yarn = rope_inverse_frequencies(spec);
  const auto yarn_base = rope_inverse_frequencies({.head_dim = dim, .base = 10000});
  // Pair p turns 4096 / (2 pi 10000^(p/64)) times: 32 times at p = 20.94, once at p = 45.03; the ramp runs from 20
  // to 46.
  for (size_t i = 0; i < 64; ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - 20) / 26, 0.0, 1.0);
    EXPECT_NEAR(yarn[i] / yarn_base[i], 1 - ramp + ramp / 4, 1e-12) << i;
  }
  EXPECT_NEAR(rope_attention_factor(spec), 0.1 * std::log(4.0) + 1, 1e-15);
}

TEST(Rope, AttentionFactorScalesTheTable) {
  Device device(test::test_device_kind(), 1);
  TestVector<int64_t> positions = {3};
  Operand table(DType::f32, Shape{1, 2, 1});
  const std::vector<double> frequencies = {0.5};
  rope_table(device, tensor_of(positions), frequencies, 1.25, table);
  expect_close(table.values(), {1.25 * std::cos(1.5), 1.25 * std::sin(1.5)}, 1e-7, "table");
}

TEST(Rope, RefusesWrongSpecs) {
  EXPECT_THROW(rope_inverse_frequencies({.head_dim = 7}), ConfigError);
  EXPECT_THROW(rope_inverse_frequencies({.head_dim = 8, .base = 1}), ConfigError);
  EXPECT_THROW(rope_inverse_frequencies({.head_dim = 8, .scaling = RopeSpec::Scaling::linear, .factor = 0.5}),
               ConfigError);
  EXPECT_THROW(rope_inverse_frequencies({.head_dim = 8, .scaling = RopeSpec::Scaling::llama3, .factor = 2}),
               ConfigError);
  EXPECT_THROW(rope_inverse_frequencies({.head_dim = 2, .scaling = RopeSpec::Scaling::ntk, .factor = 2}), ConfigError);
  Device device(test::test_dry_run());
  Operand x(DType::f32, Shape{2, 1, 5}), table(DType::f32, Shape{2, 2, 2});
  EXPECT_THROW(rope_apply(device, table, RopeStyle::half_split, RopeDirection::forward, x), InternalError);
}

}  // namespace
}  // namespace farspan
