// SPDX-License-Identifier: Apache-2.0
#include "ops/embedding.h"

#include "ops/bias.h"
#include "ops/ref/layers.h"
#include "tests/ops/operand.h"

namespace farspan {
namespace {

using test::expect_close;
using test::Operand;
using test::TestVector;

constexpr int64_t kVocabulary = 257;

TestVector<int32_t> some_tokens(int64_t count) {
  TestVector<int32_t> tokens;
  for (int64_t t = 0; t < count; ++t) tokens.push_back(static_cast<int32_t>(t * t * 31 % kVocabulary % (count + 3)));
  return tokens;
}

Tensor tensor_of(TestVector<int32_t>& tokens) {
  return {tokens.data(), DType::i32, Shape{static_cast<int64_t>(tokens.size())}};
}

class EmbeddingTest : public test::BothTypes {};

TEST_P(EmbeddingTest, MatchesReference) {
  for (const int64_t count : {1, 3, 17})
    for (const int64_t width : {10, 130}) {
      TestVector<int32_t> tokens = some_tokens(count);
      Operand weight(dtype(), Shape{kVocabulary, width}, 3), y(dtype(), Shape{count, width}, 5);
      Operand d_y(dtype(), Shape{count, width}, 1), d_weight(DType::f32, Shape{kVocabulary, width});
      weight.random(1), d_y.random(2), d_weight.random(3);
      embedding_forward(device_, tensor_of(tokens), weight, y);
      EXPECT_EQ(y.values(), ref::embedding_forward(tokens, weight.matrix()).values);
      EXPECT_TRUE(y.guards_intact());
      const auto expected = test::sum(ref::embedding_backward(tokens, d_y.matrix(), kVocabulary), d_weight.matrix());
      embedding_backward(device_, tensor_of(tokens), d_y, d_weight);
      expect_close(d_weight, expected, "d_weight");
    }
}

// Tokens that come again hundreds of times: their sums are long, and the same bits every time.
TEST_P(EmbeddingTest, FrequentTokens) {
  for (const int64_t width : {10, 72}) {
    constexpr int64_t kCount = 3000;
    TestVector<int32_t> tokens;
    for (int64_t t = 0; t < kCount; ++t)
      tokens.push_back(static_cast<int32_t>(t % 10 == 0 ? t % kVocabulary : t % 10 < 5 ? 7 : t * t % 5 + 7));
    Operand d_y(dtype(), Shape{kCount, width}, 8);
    d_y.random(2);
    Operand d_weight(DType::f32, Shape{kVocabulary, width}), again(DType::f32, Shape{kVocabulary, width});
    d_weight.random(3), again.random(3);
    const auto expected = test::sum(ref::embedding_backward(tokens, d_y.matrix(), kVocabulary), d_weight.matrix());
    embedding_backward(device_, tensor_of(tokens), d_y, d_weight);
    // Rows of a thousand terms stand beside rows of ten, which set the level that errors are held against.
    expect_close(d_weight.values(), expected.values, 1e-5, "d_weight");
    embedding_backward(device_, tensor_of(tokens), d_y, again);
    EXPECT_EQ(again.bytes(), d_weight.bytes());
  }
}

TEST_P(EmbeddingTest, BiasMatchesReference) {
  for (const int64_t tokens : {1, 3, 17})
    for (const int64_t width : {1, 10, 257}) {
      Operand bias(dtype(), Shape{width}), y(dtype(), Shape{tokens, width}, 4), d_bias(DType::f32, Shape{width});
      bias.random(1), y.random(2), d_bias.random(3);
      ref::Matrix expected = y.matrix();
      const ref::Matrix row = bias.matrix();
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < width; ++i) expected.at(t, i) += row.at(0, i);
      const auto expected_d = test::sum(ref::column_sums(y.matrix()), d_bias.matrix());
      bias_backward(device_, y, d_bias);
      expect_close(d_bias, expected_d, "d_bias");
      bias_add(device_, bias, y);
      expect_close(y, expected, "y");
    }
}

INSTANTIATE_TEST_SUITE_P(Types, EmbeddingTest, testing::Values(DType::f32, DType::bf16), test::type_name);

TEST(Embedding, RefusesTokensOutsideTheVocabulary) {
  if (test::testing_cuda()) GTEST_SKIP() << "ids cannot be looked at without waiting for the GPU";
  Device device(test::test_device_kind(), 1);
  Operand weight(DType::f32, Shape{kVocabulary, 4}), y(DType::f32, Shape{3, 4}),
      d_weight(DType::f32, Shape{kVocabulary, 4});
  weight.random(1), y.random(2), d_weight.constant(0);
  for (const int32_t bad : {static_cast<int32_t>(kVocabulary), -1}) {
    TestVector<int32_t> tokens = {0, 1, bad};
    try {
      embedding_forward(device, tensor_of(tokens), weight, y);
      FAIL() << "no exception for " << bad;
    } catch (const DataError& error) {
      EXPECT_NE(std::string(error.what()).find(fmt::format("token 2 has id {}", bad)), std::string::npos);
    }
    EXPECT_THROW(embedding_backward(device, tensor_of(tokens), y, d_weight), DataError);
    EXPECT_EQ(d_weight.values(), std::vector<double>(kVocabulary * 4, 0.0)) << "nothing written before the refusal";
  }
}

}  // namespace
}  // namespace farspan
