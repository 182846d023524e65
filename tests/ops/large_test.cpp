// SPDX-License-Identifier: Apache-2.0
// More elements than 32 bits count, in one tensor. Only where a GPU has the memory: on a CPU the far rows of the other
// tests say the same in less.
#include <cmath>
#include <gtest/gtest.h>
#include <memory>

#include "ops/cross_entropy.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/norms.h"
#include "ops/optimizer_step.h"
#include "tests/ops/operand.h"

namespace farspan {
namespace {

constexpr int64_t kCount = (int64_t{1} << 31) + 50'000'003;
// Around every boundary of 32 bits of elements or bytes, and the last element.
constexpr int64_t kPlaces[] = {
    0, 7, (int64_t{1} << 30) - 1, int64_t{1} << 30, (int64_t{1} << 31) - 1, int64_t{1} << 31, kCount - 1};

TEST(Large, B106_CastsAndScalesMoreThanTwoToThe31Elements) {
  if (!test::testing_cuda()) GTEST_SKIP() << "for GPUs";
  constexpr int64_t kNeeded = kCount * 6 + (int64_t{1} << 30);
  if (cuda_free_bytes(0) < kNeeded) GTEST_SKIP() << "needs " << kNeeded << " bytes of free GPU memory";
  Device device(DeviceKind::cuda, 1);
  const DeviceMemory narrow_memory(device, kCount * 2), wide_memory(device, kCount * 4);
  const Tensor narrow(narrow_memory.data(), DType::bf16, Shape{kCount});
  const Tensor wide(wide_memory.data(), DType::f32, Shape{kCount});
  fill(device, narrow, 1.5);
  float expected = 2;
  for (const int64_t place : kPlaces) {
    const BFloat16 value = to_bfloat16(expected++);
    copy_to_device(device, &value, narrow.slice(0, place, place + 1).raw(), 2);
  }
  fill(device, wide, -1);
  cast(device, narrow, wide);
  scale(device, wide, 2);
  const auto element = [&](int64_t place) {
    float found = 0;
    copy_to_host(device, wide.slice(0, place, place + 1).raw(), &found, 4);
    return found;
  };
  expected = 2;
  for (const int64_t place : kPlaces) EXPECT_EQ(element(place), 2 * expected++) << place;
  for (const int64_t place : {int64_t{1}, int64_t{1} << 29, kCount - 2}) EXPECT_EQ(element(place), 3) << place;
}

// Tensors of one block of GPU memory, or none where the GPU has less free than it takes.
class LargeTest : public testing::Test {
 protected:
  void allocate(int64_t bytes) {
    if (!test::testing_cuda()) GTEST_SKIP() << "for GPUs";
    if (cuda_free_bytes(0) < bytes + (int64_t{1} << 30)) GTEST_SKIP() << "needs " << bytes << " bytes of GPU memory";
    device_ = std::make_unique<Device>(DeviceKind::cuda, 1);
    memory_ = DeviceMemory(*device_, bytes);
  }
  Tensor take(DType dtype, const Shape& shape) {
    const Tensor tensor(static_cast<char*>(memory_.data()) + used_, dtype, shape);
    used_ += (tensor.bytes() + 255) / 256 * 256;
    EXPECT_LE(used_, memory_.bytes());
    return tensor;
  }
  float element(const Tensor& tensor, int64_t row, int64_t column) {
    float found = 0;
    copy_to_host(*device_, tensor.slice(0, row, row + 1).slice(1, column, column + 1).raw(), &found, 4);
    return found;
  }
  void put(const Tensor& ids, int64_t place, int32_t id) {
    copy_to_device(*device_, &id, ids.slice(0, place, place + 1).raw(), 4);
  }

  std::unique_ptr<Device> device_;
  DeviceMemory memory_;
  int64_t used_ = 0;
};

TEST_F(LargeTest, B106_LossOfMoreThanTwoToThe31Logits) {
  constexpr int64_t kVocabulary = 151936, kTokens = (int64_t{1} << 31) / kVocabulary + 3;
  allocate(4 * kTokens * (kVocabulary + 5) + (int64_t{1} << 20));
  if (!device_) return;
  const Tensor logits = take(DType::f32, Shape{kTokens, kVocabulary}), targets = take(DType::i32, Shape{kTokens});
  const Tensor loss = take(DType::f32, Shape{1, kTokens}), statistics = take(DType::f32, Shape{2, kTokens});
  fill(*device_, logits, 2);
  fill(*device_, targets, 5);
  put(targets, kTokens - 1, kVocabulary - 1);
  put(targets, kTokens - 2, -1);
  const VocabularyPart part{.first_id = 0, .vocabulary = kVocabulary};
  vocabulary_statistics(*device_, logits, targets, part, statistics);
  cross_entropy(*device_, logits, targets, 1000, loss.reshape(Shape{kTokens}), logits);
  const double logarithm = std::log(static_cast<double>(kVocabulary)), share = 1000.0 / kVocabulary;
  for (const int64_t token : {int64_t{0}, kTokens - 3, kTokens - 1}) {
    const int64_t target = token == kTokens - 1 ? kVocabulary - 1 : 5;
    EXPECT_NEAR(element(loss, 0, token), logarithm, 1e-5) << token;
    EXPECT_NEAR(element(statistics, 0, token), 2 + logarithm, 1e-5) << token;
    EXPECT_NEAR(element(logits, token, target), share - 1000, 1e-3) << token;
    for (const int64_t other : {int64_t{0}, kVocabulary / 2, kVocabulary - 2})
      EXPECT_NEAR(element(logits, token, other), share, 1e-5 * share) << token;
  }
  EXPECT_EQ(element(loss, 0, kTokens - 2), 0);
  EXPECT_EQ(element(logits, kTokens - 2, kVocabulary - 1), 0);

  fill(*device_, logits, 2);
  const Tensor lse = statistics.slice(0, 0, 1).reshape(Shape{kTokens});
  vocabulary_gradient(*device_, logits, targets, part, lse, 1000, logits);
  EXPECT_NEAR(element(logits, kTokens - 1, kVocabulary - 1), share - 1000, 1e-3);
  EXPECT_NEAR(element(logits, kTokens - 1, kVocabulary - 2), share, 1e-5 * share);
}

TEST_F(LargeTest, B106_EmbeddingOfMoreThanTwoToThe31Elements) {
  constexpr int64_t kWidth = 2048, kTokens = (int64_t{1} << 31) / kWidth + 77, kRows = 1000;
  allocate((kTokens + 2 * kRows) * kWidth * 4 + 4 * kTokens + (int64_t{1} << 20));
  if (!device_) return;
  const Tensor y = take(DType::f32, Shape{kTokens, kWidth}), tokens = take(DType::i32, Shape{kTokens});
  const Tensor weight = take(DType::f32, Shape{kRows, kWidth}), d_weight = take(DType::f32, Shape{kRows, kWidth});
  fill(*device_, tokens, 7);
  put(tokens, kTokens - 1, kRows - 1);
  fill(*device_, weight, 1);
  fill(*device_, weight.slice(0, kRows - 1, kRows), 3);
  fill(*device_, d_weight, 0.5);
  embedding_forward(*device_, tokens, weight, y);
  EXPECT_EQ(element(y, kTokens - 2, kWidth - 1), 1);
  EXPECT_EQ(element(y, kTokens - 1, kWidth - 1), 3);
  embedding_backward(*device_, tokens, y, d_weight);
  EXPECT_EQ(element(d_weight, kRows - 1, kWidth - 1), 3.5);
  EXPECT_EQ(element(d_weight, 7, 0), static_cast<float>(kTokens - 1 + 0.5));
  EXPECT_EQ(element(d_weight, 8, 0), 0.5);
}

TEST_F(LargeTest, B106_SumsAndStepsOfMoreThanTwoToThe31Elements) {
  allocate(4 * kCount * 4 + (int64_t{1} << 20));
  if (!device_) return;
  const Tensor gradient = take(DType::f32, Shape{kCount}), weight = take(DType::f32, Shape{kCount});
  const Tensor m = take(DType::f32, Shape{kCount}), v = take(DType::f32, Shape{kCount});
  fill(*device_, gradient, 1), fill(*device_, weight, 5), fill(*device_, m, 0), fill(*device_, v, 0);
  test::Sum sum;
  sum_of_squares(*device_, gradient, sum);
  EXPECT_EQ(sum.value(), static_cast<double>(kCount));
  // The first step goes lr against the gradient's sign.
  adamw_step(*device_, {.lr = 2}, gradient, weight, m, v, Tensor());
  sgd_step(*device_, {.lr = 0.5}, gradient, v, Tensor());
  for (const int64_t place : kPlaces) {
    EXPECT_NEAR(element(weight.reshape(Shape{1, kCount}), 0, place), 3, 1e-5) << place;
    EXPECT_NEAR(element(v.reshape(Shape{1, kCount}), 0, place), 0.05 - 0.5, 1e-6) << place;
  }
}

}  // namespace
}  // namespace farspan
