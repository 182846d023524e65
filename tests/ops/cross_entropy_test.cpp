// SPDX-License-Identifier: Apache-2.0
#include "ops/cross_entropy.h"

#include <limits>

#include "ops/ref/cross_entropy.h"
#include "tests/ops/operand.h"

namespace farspan {
namespace {

using test::expect_close;
using test::Operand;
using test::TestVector;

constexpr double kScale = 0.125;

// Every third target ignored, the others spread over the vocabulary.
TestVector<int32_t> some_targets(int64_t tokens, int64_t vocabulary) {
  TestVector<int32_t> targets;
  for (int64_t t = 0; t < tokens; ++t)
    targets.push_back(t % 3 == 2 ? -1 : static_cast<int32_t>((7 * t + vocabulary - 1) % vocabulary));
  return targets;
}

Tensor tensor_of(TestVector<int32_t>& targets) {
  return {targets.data(), DType::i32, Shape{static_cast<int64_t>(targets.size())}};
}

// The dtype is the gradient's; logits are f32.
class CrossEntropyTest : public test::BothTypes {
 protected:
  void expect_every_use(const Operand& logits, TestVector<int32_t>& targets, int64_t padding);
};

TEST_P(CrossEntropyTest, MatchesReference) {
  for (const int64_t tokens : {1, 3, 17})
    for (const int64_t vocabulary : {1, 10, 257, 5003})
      for (const int64_t padding : {0, 5}) {
        Operand logits(DType::f32, Shape{tokens, vocabulary}, padding), loss(DType::f32, Shape{tokens});
        Operand d_logits(dtype(), Shape{tokens, vocabulary}, 2 * padding);
        logits.random(1, 4);
        TestVector<int32_t> targets = some_targets(tokens, vocabulary);
        const auto expected = ref::cross_entropy(logits.matrix(), targets, kScale);
        cross_entropy(device_, logits, tensor_of(targets), kScale, loss, d_logits);
        const std::string what = fmt::format("tokens {} vocabulary {} padding {}", tokens, vocabulary, padding);
        expect_close(loss, expected.token_loss, "loss " + what);
        expect_close(d_logits, expected.d_logits, "d_logits " + what);

        Operand evaluation(DType::f32, Shape{tokens});
        cross_entropy(device_, logits, tensor_of(targets), kScale, evaluation, Tensor());
        EXPECT_EQ(evaluation.bytes(), loss.bytes()) << "evaluation gives the same bits, " << what;
        if (dtype() != DType::f32) continue;
        cross_entropy(device_, logits, tensor_of(targets), kScale, loss, logits);  // d_logits = logits
        EXPECT_EQ(logits.values(), d_logits.values()) << what;
        EXPECT_EQ(evaluation.bytes(), loss.bytes()) << what;
      }
}

// Loss and gradient against the reference; the loss alone, and with the gradient in place, has the same bits.
void CrossEntropyTest::expect_every_use(const Operand& logits, TestVector<int32_t>& targets, int64_t padding) {
  const Shape shape = logits.tensor().shape(), rows{shape[0]};
  Operand loss(DType::f32, rows), evaluation(DType::f32, rows), d_logits(dtype(), shape, padding);
  const auto expected = ref::cross_entropy(logits.matrix(), targets, kScale);
  cross_entropy(device_, logits, tensor_of(targets), kScale, loss, d_logits);
  expect_close(loss, expected.token_loss, "loss, " + shape.str());
  expect_close(d_logits, expected.d_logits, "d_logits, " + shape.str());
  cross_entropy(device_, logits, tensor_of(targets), kScale, evaluation, Tensor());
  EXPECT_EQ(evaluation.bytes(), loss.bytes()) << shape.str();
  if (dtype() != DType::f32) return;
  cross_entropy(device_, logits, tensor_of(targets), kScale, loss, logits);
  EXPECT_EQ(logits.values(), d_logits.values()) << shape.str();
  EXPECT_EQ(evaluation.bytes(), loss.bytes()) << shape.str();
}

// Rows that kernels cut into parts, whole vectors or not, up to one that no GPU keeps on the chip.
TEST_P(CrossEntropyTest, LargeVocabularies) {
  for (const int64_t vocabulary :
       {128, 288, 384, 385, 1024, 12000, 16384, 30001, 60000, 151936, 151937, 262144, 262145, 320000, 600002}) {
    Operand logits(DType::f32, Shape{3, vocabulary});
    logits.random(1, 4);
    TestVector<int32_t> targets = {static_cast<int32_t>(vocabulary - 1), -1, 7};
    expect_every_use(logits, targets, vocabulary % 2);
  }
}

// So many rows that on a GPU each block, or each cluster of blocks, takes several, among them some that do not count.
TEST_P(CrossEntropyTest, ManyRows) {
  const int64_t elements = test::testing_cuda() ? 18'000'000 : 1'000'000;
  for (const int64_t vocabulary : {1500, 9001, 20000, 40000, 151936, 151937}) {
    const int64_t rows = std::max<int64_t>(4, std::min<int64_t>(900, elements / vocabulary));
    Operand logits(DType::f32, Shape{rows, vocabulary});
    logits.random(1, 4);
    TestVector<int32_t> targets = some_targets(rows, vocabulary);
    expect_every_use(logits, targets, 0);
  }
}

// Rows that begin anywhere within 16 bytes, and of which the last ends where its memory does.
TEST_P(CrossEntropyTest, RowsThatBeginAnywhere) {
  for (const int64_t vocabulary : {257, 5000, 5003, 32768, 600002})
    for (const int64_t before : {1, 2, 3}) {
      Operand whole(DType::f32, Shape{3, before + vocabulary}), loss(DType::f32, Shape{3});
      Operand d_whole(dtype(), Shape{3, before + vocabulary});
      whole.random(1, 4), d_whole.constant(7);
      const auto row_of = [&](const Operand& x) { return x.tensor().slice(1, before, before + vocabulary); };
      const Tensor logits = row_of(whole), d_logits = row_of(d_whole);
      TestVector<int32_t> targets = {0, static_cast<int32_t>(vocabulary - 1), static_cast<int32_t>(vocabulary - 1)};
      const auto expected = ref::cross_entropy(ref::matrix_of(logits), targets, kScale);
      const std::string what = fmt::format("vocabulary {} from {}", vocabulary, before);
      cross_entropy(device_, logits, tensor_of(targets), kScale, loss, d_logits);
      expect_close(loss, expected.token_loss, "loss, " + what);
      expect_close(ref::matrix_of(d_logits).values, expected.d_logits.values, test::tolerance(dtype()), what);
      const std::vector<double> found = d_whole.values();
      for (int64_t row = 0; row < 3; ++row)
        for (int64_t i = 0; i < before; ++i)
          ASSERT_EQ(found[static_cast<size_t>(row * (before + vocabulary) + i)], 7) << what;
      if (dtype() != DType::f32) continue;
      cross_entropy(device_, logits, tensor_of(targets), kScale, loss, logits);
      test::wait_for_test_device();
      EXPECT_EQ(ref::matrix_of(logits).values, ref::matrix_of(d_logits).values) << what;
    }
}

TEST_P(CrossEntropyTest, LargeLogitsDoNotOverflow) {
  Operand logits(DType::f32, Shape{2, 10}), loss(DType::f32, Shape{2}), d_logits(dtype(), Shape{2, 10});
  logits.set([](int64_t i) { return i < 10 ? 1e4 + static_cast<double>(i) : -1e30 * static_cast<double>(i); });
  TestVector<int32_t> targets = {9, 0};
  const auto expected = ref::cross_entropy(logits.matrix(), targets, 1);
  cross_entropy(device_, logits, tensor_of(targets), 1, loss, d_logits);
  expect_close(loss, expected.token_loss, "loss");
  expect_close(d_logits, expected.d_logits, "d_logits");
}

TEST_P(CrossEntropyTest, B057_NoTargetsGiveZeroNotNaN) {
  Operand logits(DType::f32, Shape{3, 10}), loss(DType::f32, Shape{3}), d_logits(dtype(), Shape{3, 10});
  logits.random(1);
  TestVector<int32_t> targets = {-1, -1, -1};
  cross_entropy(device_, logits, tensor_of(targets), kScale, loss, d_logits);
  EXPECT_EQ(loss.values(), std::vector<double>(3, 0.0));
  EXPECT_EQ(d_logits.values(), std::vector<double>(30, 0.0));
  test::Sum sum;
  token_loss_sum(device_, loss, sum);
  EXPECT_EQ(sum.value(), 0.0);
}

TEST_P(CrossEntropyTest, B058_IgnoredRowsAreSelectedAway) {
  for (const double poison : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    Operand logits(DType::f32, Shape{3, 10}), loss(DType::f32, Shape{3}), d_logits(dtype(), Shape{3, 10});
    Operand clean(DType::f32, Shape{3, 10}), clean_loss(DType::f32, Shape{3}), clean_d(dtype(), Shape{3, 10});
    clean.random(1);
    const std::vector<double> values = clean.values();
    logits.set([&](int64_t i) { return i / 10 == 1 ? poison : values[static_cast<size_t>(i)]; });
    TestVector<int32_t> targets = {4, -1, 0};
    cross_entropy(device_, clean, tensor_of(targets), kScale, clean_loss, clean_d);
    cross_entropy(device_, logits, tensor_of(targets), kScale, loss, d_logits);
    EXPECT_EQ(loss.bytes(), clean_loss.bytes());
    EXPECT_EQ(d_logits.bytes(), clean_d.bytes());
    for (size_t i = 10; i < 20; ++i) EXPECT_EQ(d_logits.values()[i], 0.0);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, CrossEntropyTest, testing::Values(DType::f32, DType::bf16), test::type_name);

// A NaN or +inf in a row that counts must show in the loss, wherever in the row it stands.
TEST(CrossEntropy, BrokenLogitsShow) {
  Device device(test::test_device_kind(), 1);
  for (const double broken : {std::nan(""), std::numeric_limits<double>::infinity()})
    for (int64_t place = 0; place < 37; ++place) {
      Operand logits(DType::f32, Shape{1, 37}), loss(DType::f32, Shape{1});
      logits.set([&](int64_t i) { return i == place ? broken : 0.01 * static_cast<double>(i); });
      TestVector<int32_t> targets = {5};
      cross_entropy(device, logits, tensor_of(targets), 1, loss, Tensor());
      EXPECT_TRUE(std::isnan(loss.values()[0])) << place;
    }
}

TEST(CrossEntropy, MaskedVocabularyEntriesOfMinusInfinity) {
  Device device(test::test_device_kind(), 1);
  Operand logits(DType::f32, Shape{1, 20}), loss(DType::f32, Shape{1}), d_logits(DType::f32, Shape{1, 20});
  logits.set([](int64_t i) { return i < 4 ? 0.0 : -std::numeric_limits<double>::infinity(); });
  TestVector<int32_t> targets = {1};
  cross_entropy(device, logits, tensor_of(targets), 1, loss, d_logits);
  EXPECT_NEAR(loss.values()[0], std::log(4.0), 1e-6);
  EXPECT_NEAR(d_logits.values()[1], -0.75, 1e-6);
  for (size_t i = 4; i < 20; ++i) EXPECT_EQ(d_logits.values()[i], 0.0);
}

TEST(CrossEntropy, ReferenceBackwardIsTheDerivative) {
  Operand logits(DType::f32, Shape{3, 10});
  logits.random(1);
  const TestVector<int32_t> targets = {3, -1, 9};
  ref::Matrix ones(3, 1);
  ones.values.assign(3, kScale);
  const auto forward = [&](const ref::Matrix& m) { return ref::cross_entropy(m, targets, 1).token_loss; };
  expect_close(ref::cross_entropy(logits.matrix(), targets, kScale).d_logits.values,
               test::numeric_gradient(logits.matrix(), ones, forward), test::kNumericTolerance, "d_logits");
}

TEST(CrossEntropy, RefusesTargetsOutsideTheVocabulary) {
  if (test::testing_cuda()) GTEST_SKIP() << "ids cannot be looked at without waiting for the GPU";
  Device device(test::test_device_kind(), 1);
  Operand logits(DType::f32, Shape{2, 10}), loss(DType::f32, Shape{2});
  logits.random(1);
  for (const int32_t bad : {10, -2, -100}) {
    TestVector<int32_t> targets = {0, bad};
    try {
      cross_entropy(device, logits, tensor_of(targets), 1, loss, Tensor());
      FAIL() << "no exception for " << bad;
    } catch (const DataError& error) {
      EXPECT_NE(std::string(error.what()).find(fmt::format("target 1 has id {}", bad)), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace farspan
