// SPDX-License-Identifier: Apache-2.0
#include "ops/dropout.h"

#include <numeric>
#include <set>

#include "ops/dropout_rule.h"
#include "ops/elementwise.h"
#include "ops/ref/layers.h"
#include "tests/ops/operand.h"

namespace farspan {
namespace {

using test::expect_close;
using test::Operand;
using test::TestVector;

constexpr uint64_t kKey = 0x123456789abcdef0;

// Tokens in no order, some past 2^32.
TestVector<int64_t> spread_tokens(int64_t count) {
  TestVector<int64_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(i * 7919 % 1000 + (i % 3) * (int64_t{1} << 40));
  return tokens;
}

Tensor tensor_of(TestVector<int64_t>& tokens) {
  return {tokens.data(), DType::i64, Shape{static_cast<int64_t>(tokens.size())}};
}

class DropoutTest : public test::BothTypes {};

TEST_P(DropoutTest, AddsWhatIsKeptTimesTheInverseShare) {
  for (const int64_t width : {1, 6, 257, 600, 4096})
    for (const double p : {0.1, 0.5, 0.9}) {
      const Dropout dropout{p, kKey};
      const Shape shape{9, width};
      TestVector<int64_t> tokens = spread_tokens(9);
      // Rows apart by what forbids wide accesses, or by a multiple of them.
      const int64_t padding = width == 4096 || width == 600 ? 16 : 1;
      Operand x(DType::f32, shape, 3 * padding), z(dtype(), shape, 5 * padding), y(DType::f32, shape, 2 * padding);
      Operand d_z(dtype(), shape);
      x.random(1), z.random(2);
      const ref::Matrix kept = ref::dropped(z.matrix(), tokens, dropout);
      dropout_add(device_, dropout, tensor_of(tokens), x, z, y);
      expect_close(y, test::sum(x.matrix(), kept), "y");
      dropout_backward(device_, dropout, tensor_of(tokens), z, d_z);
      expect_close(d_z, kept, "d_z");
      const std::vector<double> found = d_z.values();
      for (size_t i = 0; i < kept.values.size(); ++i)
        EXPECT_EQ(found[i] == 0, kept.values[i] == 0) << "backward drops the same elements, " << i;
    }
}

TEST_P(DropoutTest, MeanShareAndExactScale) {
  for (const double p : {0.1, 0.25, 0.5}) {
    TestVector<int64_t> tokens = spread_tokens(200);
    Operand z(dtype(), Shape{200, 300}), y(dtype(), Shape{200, 300});
    z.constant(1);
    dropout_add(device_, {p, kKey}, tensor_of(tokens), Tensor(), z, y);
    const float scale = static_cast<float>(1 / (1 - p));
    const double value = dtype() == DType::f32 ? scale : to_float(to_bfloat16(scale));
    int64_t count = 0;
    for (const double found : y.values()) {
      ASSERT_TRUE(found == 0 || found == value) << found;
      count += found != 0;
    }
    // 60000 independent draws: four standard deviations.
    EXPECT_NEAR(static_cast<double>(count) / 60000, 1 - p, 4 * std::sqrt(p * (1 - p) / 60000));
  }
}

TEST_P(DropoutTest, InPlaceAndInAnySplitOfRowsTheSameBits) {
  const Dropout dropout{0.3, kKey};
  const Shape shape{67, 514};
  TestVector<int64_t> index = spread_tokens(67);
  const Tensor tokens = tensor_of(index);
  Operand x(dtype(), shape), z(dtype(), shape), y(dtype(), shape);
  x.random(1), z.random(2);
  dropout_add(device_, dropout, tokens, x, z, y);
  for (const int threads : {1, 3}) {
    Device other(test::test_device_kind(), threads);
    for (const bool over_x : {true, false}) {
      Operand a(dtype(), shape), b(dtype(), shape);
      a.random(1), b.random(2);
      dropout_add(other, dropout, tokens, a, b, over_x ? a : b);
      EXPECT_EQ((over_x ? a : b).bytes(), y.bytes()) << threads << " threads";
    }
  }
  Operand parts(dtype(), shape);
  for (const auto& [begin, end] : {std::pair{0, 1}, std::pair{1, 40}, std::pair{40, 67}})
    dropout_add(device_, dropout, tokens.slice(0, begin, end), x.tensor().slice(0, begin, end),
                z.tensor().slice(0, begin, end), parts.tensor().slice(0, begin, end));
  EXPECT_EQ(parts.bytes(), y.bytes()) << "rows in three calls";
  Operand gradient(dtype(), shape);
  gradient.random(3);
  Operand d_z(dtype(), shape);
  dropout_backward(device_, dropout, tokens, gradient, d_z);
  dropout_backward(device_, dropout, tokens, gradient, gradient);
  EXPECT_EQ(gradient.bytes(), d_z.bytes());
}

TEST_P(DropoutTest, ProbabilityZeroIsAPlainAddAndNeedsNoTokens) {
  const Shape shape{7, 130};
  Operand x(dtype(), shape), z(dtype(), shape), y(dtype(), shape), sum(dtype(), shape);
  x.random(1), z.random(2);
  dropout_add(device_, {0, kKey}, Tensor(), x, z, y);
  add(device_, x, z, sum);
  EXPECT_EQ(y.bytes(), sum.bytes());
  dropout_backward(device_, {0, kKey}, Tensor(), z, y);
  EXPECT_EQ(y.bytes(), z.bytes());
}

INSTANTIATE_TEST_SUITE_P(Types, DropoutTest, testing::Values(DType::f32, DType::bf16), test::type_name);

// A row's mask is its token's, on whichever rank and place in memory the token lies.
TEST(Dropout, B078_TheMaskFollowsTheToken) {
  Device device(test::test_device_kind(), 2);
  const Dropout dropout{0.5, dropout_key(7, 3, 1, "mlp")};
  constexpr int64_t kTokens = 64, kWidth = 40;
  TestVector<int64_t> index(kTokens);
  std::iota(index.begin(), index.end(), 0);
  Operand ones(DType::f32, Shape{kTokens, kWidth}), whole(DType::f32, Shape{kTokens, kWidth});
  ones.constant(1);
  dropout_add(device, dropout, tensor_of(index), Tensor(), ones, whole);
  const std::vector<double> one_rank = whole.values();
  const auto row = [&](const std::vector<double>& values, int64_t t) {
    return std::vector<double>(values.begin() + t * kWidth, values.begin() + (t + 1) * kWidth);
  };
  // Zigzag over two ranks: rank 0 holds the first and the last quarter, rank 1 those between.
  for (const int64_t first : {0, 16}) {
    TestVector<int64_t> part;
    for (int64_t i = 0; i < 32; ++i) part.push_back(i < 16 ? first + i : 32 - first + i);
    Operand found(DType::f32, Shape{32, kWidth});
    dropout_add(device, dropout, tensor_of(part), Tensor(), ones.tensor().slice(0, 0, 32), found);
    for (int64_t i = 0; i < 32; ++i)
      EXPECT_EQ(row(found.values(), i), row(one_rank, part[static_cast<size_t>(i)])) << "row " << i;
  }
  std::set<std::vector<double>> different;
  for (int64_t t = 0; t < kTokens; ++t) different.insert(row(one_rank, t));
  EXPECT_EQ(different.size(), 64u) << "no two tokens share a mask";
}

TEST(Dropout, KeysDifferInEveryPart) {
  std::set<uint64_t> keys;
  for (int64_t seed : {0, 1, 2})
    for (int64_t step : {0, 1, 2})
      for (int64_t layer : {0, 1, 2})
        for (const char* place : {"attention", "attention_output", "mlp", "embedding"})
          keys.insert(dropout_key(seed, step, layer, place));
  EXPECT_EQ(keys.size(), 27u * 4);
  EXPECT_EQ(dropout_key(1, 2, 3, "mlp"), dropout_key(1, 2, 3, "mlp"));
}

TEST(Dropout, DroppedNaNsDoNoHarm) {
  Device device(test::test_device_kind(), 1);
  const Dropout dropout{0.5, kKey};
  TestVector<int64_t> tokens = {5};
  Operand z(DType::f32, Shape{1, 64}), y(DType::f32, Shape{1, 64});
  z.constant(1);
  const std::vector<double> expected = ref::dropped(z.matrix(), tokens, dropout).values;
  z.set([&](int64_t c) { return expected[static_cast<size_t>(c)] == 0 ? std::nan("") : 1.0; });
  dropout_add(device, dropout, tensor_of(tokens), Tensor(), z, y);
  EXPECT_EQ(y.values(), expected);
}

TEST(Dropout, RuleTakesWhatIsBelowOne) {
  EXPECT_EQ(DropoutRule(0.5).threshold, 0x80000000u);
  EXPECT_EQ(DropoutRule(0.5).scale, 2.0f);
  EXPECT_EQ(DropoutRule(0).threshold, 0u);
  EXPECT_EQ(DropoutRule(1 - 1e-15).threshold, 0xffffffffu);
  for (const double bad : {1.0, 1.5, -0.1, std::nan("")}) EXPECT_THROW(DropoutRule{bad}, InternalError) << bad;
  Device device(test::test_device_kind(), 1);
  TestVector<int64_t> tokens = {0, 1};
  Operand z(DType::f32, Shape{3, 4});
  z.random(1);
  EXPECT_THROW(dropout_backward(device, {0.5, 1}, tensor_of(tokens), z, z), InternalError);
  EXPECT_THROW(dropout_backward(device, {0.5, 1}, Tensor(), z, z), InternalError);
}

}  // namespace
}  // namespace farspan
