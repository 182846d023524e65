// SPDX-License-Identifier: Apache-2.0
// A vocabulary dealt to several ranks, simulated one after the other: embedding and cross-entropy give what one rank
// gives, for even, uneven and empty parts.
#include <limits>

#include "ops/cross_entropy.h"
#include "ops/embedding.h"
#include "ops/ref/cross_entropy.h"
#include "ops/ref/layers.h"
#include "tests/ops/operand.h"

namespace farspan {
namespace {

using test::expect_close;
using test::Operand;
using test::TestVector;

constexpr double kScale = 0.125;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor tensor_of(TestVector<int32_t>& ids) { return {ids.data(), DType::i32, Shape{static_cast<int64_t>(ids.size())}}; }

// First id of each part, and the vocabulary's size at the end.
using Bounds = std::vector<int64_t>;

std::vector<Bounds> splits_of(int64_t vocabulary) {
  const int64_t third = vocabulary / 3;
  return {{0, vocabulary},
          {0, vocabulary / 2, vocabulary},
          {0, third, 2 * third + 1, vocabulary},
          {0, 0, 1, 1, vocabulary - 1, vocabulary}};  // two parts of none and two of one
}

struct Loss {
  Loss(int64_t tokens, int64_t vocabulary, DType dtype)
      : lse(DType::f32, Shape{tokens}), token(DType::f32, Shape{tokens}), d_logits(dtype, Shape{tokens, vocabulary}) {}
  Operand lse, token, d_logits;
};

// The four steps of ops/cross_entropy.h, rank after rank. With `in_place` the gradients land in the logits.
void run_parts(Device& device, Operand& logits, TestVector<int32_t>& targets, const Bounds& bounds, Loss& loss,
               bool in_place = false) {
  const int64_t ranks = static_cast<int64_t>(bounds.size()) - 1;
  const int64_t tokens = logits.tensor().dim(0);
  const auto part_of = [&](const Tensor& whole, int64_t r) {
    return whole.slice(1, bounds[static_cast<size_t>(r)], bounds[static_cast<size_t>(r) + 1]);
  };
  const auto part = [&](int64_t r) { return VocabularyPart{bounds[static_cast<size_t>(r)], bounds.back()}; };
  Operand all(DType::f32, Shape{ranks, 2, tokens});
  for (int64_t r = 0; r < ranks; ++r)
    vocabulary_statistics(device, part_of(logits, r), tensor_of(targets), part(r),
                          all.tensor().slice(0, r, r + 1).reshape(Shape{2, tokens}));
  combine_statistics(device, all, tensor_of(targets), loss.lse, loss.token);
  for (int64_t r = 0; r < ranks; ++r)
    vocabulary_gradient(device, part_of(logits, r), tensor_of(targets), part(r), loss.lse, kScale,
                        part_of(in_place ? logits.tensor() : loss.d_logits.tensor(), r));
}

TestVector<int32_t> some_targets(int64_t tokens, int64_t vocabulary) {
  TestVector<int32_t> targets;
  for (int64_t t = 0; t < tokens; ++t)
    targets.push_back(t % 4 == 2 ? -1 : static_cast<int32_t>((11 * t + vocabulary - 1) % vocabulary));
  return targets;
}

class VocabularyParallelTest : public test::BothTypes {};

TEST_P(VocabularyParallelTest, CrossEntropyMatchesReference) {
  for (const int64_t tokens : {1, 17})
    for (const int64_t vocabulary : {7, 257, 2503, 40001})
      for (const Bounds& bounds : splits_of(vocabulary)) {
        const std::string what = fmt::format("{} tokens, {} ids, {} ranks", tokens, vocabulary, bounds.size() - 1);
        Operand logits(DType::f32, Shape{tokens, vocabulary}, 3);
        logits.random(1, 4);
        TestVector<int32_t> targets = some_targets(tokens, vocabulary);
        const auto expected = ref::cross_entropy(logits.matrix(), targets, kScale);
        Loss loss(tokens, vocabulary, dtype());
        run_parts(device_, logits, targets, bounds, loss);
        expect_close(loss.token, expected.token_loss, "loss, " + what);
        expect_close(loss.d_logits, expected.d_logits, "d_logits, " + what);
        for (size_t t = 0; t < targets.size(); ++t)
          if (targets[t] < 0) {
            EXPECT_EQ(loss.token.values()[t], 0.0);
            EXPECT_EQ(loss.lse.values()[t], 0.0);
          }
        if (dtype() != DType::f32) continue;
        run_parts(device_, logits, targets, bounds, loss, true);
        EXPECT_EQ(logits.values(), loss.d_logits.values()) << what;
        EXPECT_TRUE(logits.guards_intact()) << what;
      }
}

TEST_P(VocabularyParallelTest, B058_IgnoredRowsAreSelectedAway) {
  for (const double poison : {std::nan(""), kInfinity}) {
    Operand logits(DType::f32, Shape{3, 10}), clean(DType::f32, Shape{3, 10});
    clean.random(1);
    const std::vector<double> values = clean.values();
    logits.set([&](int64_t i) { return i / 10 == 1 ? poison : values[static_cast<size_t>(i)]; });
    TestVector<int32_t> targets = {4, -1, 9};
    Loss loss(3, 10, dtype()), clean_loss(3, 10, dtype());
    run_parts(device_, logits, targets, {0, 3, 10}, loss);
    run_parts(device_, clean, targets, {0, 3, 10}, clean_loss);
    EXPECT_EQ(loss.token.bytes(), clean_loss.token.bytes());
    EXPECT_EQ(loss.d_logits.bytes(), clean_loss.d_logits.bytes());
    for (size_t i = 10; i < 20; ++i) EXPECT_EQ(loss.d_logits.values()[i], 0.0);
  }
}

TEST_P(VocabularyParallelTest, EmbeddingOfTheRanksAddsUp) {
  constexpr int64_t kVocabulary = 23, kTokens = 40, kWidth = 10;
  TestVector<int32_t> tokens;
  for (int64_t t = 0; t < kTokens; ++t) tokens.push_back(static_cast<int32_t>(t * t % kVocabulary));
  Operand weight(dtype(), Shape{kVocabulary, kWidth}, 3), d_y(dtype(), Shape{kTokens, kWidth}, 1);
  weight.random(1), d_y.random(2);
  const ref::Matrix expected = ref::embedding_forward(tokens, weight.matrix());
  for (const Bounds& bounds : splits_of(kVocabulary)) {
    Operand d_weight(DType::f32, Shape{kVocabulary, kWidth}), whole(DType::f32, Shape{kVocabulary, kWidth});
    d_weight.random(3), whole.random(3);
    std::vector<double> sum(kTokens * kWidth, 0.0);
    for (size_t r = 0; r + 1 < bounds.size(); ++r) {
      const VocabularyPart part{bounds[r], kVocabulary};
      Operand y(DType::f32, Shape{kTokens, kWidth}, 5), narrow(dtype(), Shape{kTokens, kWidth});
      y.constant(7), narrow.constant(7);
      embedding_forward(device_, tensor_of(tokens), weight.tensor().slice(0, bounds[r], bounds[r + 1]), part, y);
      embedding_forward(device_, tensor_of(tokens), weight.tensor().slice(0, bounds[r], bounds[r + 1]), part, narrow);
      EXPECT_EQ(y.values(), narrow.values()) << "rows are copied, so a wider type changes nothing";
      EXPECT_TRUE(y.guards_intact());
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += y.values()[i];
      embedding_backward(device_, tensor_of(tokens), d_y, part, d_weight.tensor().slice(0, bounds[r], bounds[r + 1]));
    }
    EXPECT_EQ(sum, expected.values);
    embedding_backward(device_, tensor_of(tokens), d_y, whole);
    EXPECT_EQ(d_weight.bytes(), whole.bytes()) << "a row's sum does not depend on who holds it";
  }
}

INSTANTIATE_TEST_SUITE_P(Types, VocabularyParallelTest, testing::Values(DType::f32, DType::bf16), test::type_name);

// A rank may hold nothing but entries that are masked out of the vocabulary.
TEST(VocabularyParallel, PartsOfMinusInfinityAddNothing) {
  Device device(test::test_device_kind(), 1);
  Operand logits(DType::f32, Shape{1, 20});
  logits.set([](int64_t i) { return i < 4 ? 0.0 : -kInfinity; });
  TestVector<int32_t> targets = {1};
  Loss loss(1, 20, DType::f32);
  run_parts(device, logits, targets, {0, 6, 20}, loss);
  EXPECT_NEAR(loss.token.values()[0], std::log(4.0), 1e-6);
  EXPECT_NEAR(loss.d_logits.values()[1], -0.75 * kScale, 1e-7);
  for (size_t i = 4; i < 20; ++i) EXPECT_EQ(loss.d_logits.values()[i], 0.0);
}

// A NaN or +inf in a row that counts must show in the loss, on whichever rank it stands and beside whatever.
TEST(VocabularyParallel, BrokenLogitsShow) {
  Device device(test::test_device_kind(), 1);
  for (const double broken : {std::nan(""), kInfinity})
    for (const double others : {0.5, -kInfinity})
      for (int64_t place = 0; place < 37; ++place) {
        Operand logits(DType::f32, Shape{1, 37});
        logits.set([&](int64_t i) { return i == place ? broken : i == 5 ? 0.25 : others; });
        TestVector<int32_t> targets = {5};
        Loss loss(1, 37, DType::f32);
        run_parts(device, logits, targets, {0, 18, 37}, loss);
        EXPECT_TRUE(std::isnan(loss.token.values()[0])) << broken << " at " << place;
      }
}

TEST(VocabularyParallel, LargeLogitsDoNotOverflow) {
  Device device(test::test_device_kind(), 1);
  Operand logits(DType::f32, Shape{2, 10});
  logits.set([](int64_t i) { return i < 10 ? 1e4 + static_cast<double>(i) : -1e30 * static_cast<double>(i); });
  TestVector<int32_t> targets = {9, 0};
  const auto expected = ref::cross_entropy(logits.matrix(), targets, kScale);
  Loss loss(2, 10, DType::f32);
  run_parts(device, logits, targets, {0, 5, 10}, loss);
  // The log-sum-exp is rounded to fp32 near 1e4, as the logits are: half of 2^-10 off, and so is every exponent.
  EXPECT_NEAR(loss.token.values()[0], expected.token_loss.values[0], 1.0 / 2048);
  expect_close(loss.d_logits.values(), expected.d_logits.values, 1.0 / 1024, "d_logits");
}

// What was thrown as the given type, or that nothing was.
template <typename Body>
std::string data_error_of(const Body& body) {
  try {
    body();
  } catch (const DataError& error) {
    return error.what();
  }
  return "nothing thrown";
}

TEST(VocabularyParallel, B092_IdsOutsideTheWholeVocabularyAreRefusedOnEveryRank) {
  if (test::testing_cuda()) GTEST_SKIP() << "ids cannot be looked at without waiting for the GPU";
  Device device(test::test_device_kind(), 1);
  Operand weight(DType::f32, Shape{100, 4}), y(DType::f32, Shape{3, 4}), d_weight(DType::f32, Shape{100, 4});
  Operand logits(DType::f32, Shape{3, 100}), statistics(DType::f32, Shape{2, 3}), lse(DType::f32, Shape{3});
  weight.random(1), y.random(2), d_weight.constant(0), logits.random(3), lse.constant(0);
  for (const int64_t first : {0, 100, 157})
    for (const int32_t bad : {257, -1, -2}) {
      const VocabularyPart part{first, 257};
      TestVector<int32_t> ids = {0, 200, bad};
      const auto contains = [&](const std::string& text, const std::string& message) {
        EXPECT_NE(message.find(text), std::string::npos) << message;
      };
      const std::string token = fmt::format("token 2 has id {}", bad), target = fmt::format("target 2 has id {}", bad);
      contains(token, data_error_of([&] { embedding_forward(device, tensor_of(ids), weight, part, y); }));
      contains(token, data_error_of([&] { embedding_backward(device, tensor_of(ids), y, part, d_weight); }));
      if (bad == -1) continue;  // a target to ignore
      contains(target, data_error_of([&] { vocabulary_statistics(device, logits, tensor_of(ids), part, statistics); }));
      contains(target,
               data_error_of([&] { vocabulary_gradient(device, logits, tensor_of(ids), part, lse, 1, logits); }));
    }
  EXPECT_EQ(d_weight.values(), std::vector<double>(400, 0.0)) << "nothing written before the refusal";
  TestVector<int32_t> fine = {0, 200, 256};
  EXPECT_EQ(data_error_of([&] {
              embedding_forward(device, tensor_of(fine), weight, {157, 257}, y);
            }),
            "nothing thrown");
  EXPECT_THROW(embedding_forward(device, tensor_of(fine), weight, {158, 257}, y), InternalError);
  EXPECT_THROW(vocabulary_statistics(device, logits, tensor_of(fine), {158, 257}, statistics), InternalError);
}

}  // namespace
}  // namespace farspan
