// SPDX-License-Identifier: Apache-2.0
#include "ops/rms_norm_rope.h"

#include <array>

#include "ops/ref/layers.h"
#include "tests/ops/operand.h"

namespace farspan {
namespace {

using test::expect_close;
using test::Operand;
using test::TestVector;

constexpr double kEpsilon = 1e-6;
constexpr int64_t kTokens = 19;

class RmsNormRopeTest : public test::BothTypes {
 protected:
  RmsNormRopeTest() {
    for (int64_t t = 0; t < kTokens; ++t) positions_.push_back(t * t * 97);
  }
  Tensor position_tensor() { return {positions_.data(), DType::i64, Shape{kTokens}}; }
  std::vector<int64_t> positions() const { return {positions_.begin(), positions_.end()}; }

  TestVector<int64_t> positions_;
};

TEST_P(RmsNormRopeTest, BothDirectionsMatchNormAndRotation) {
  for (const RopeStyle style : {RopeStyle::half_split, RopeStyle::interleaved})
    for (const auto& [heads, head_dim] : std::vector<std::pair<int64_t, int64_t>>{{3, 10},
                                                                                  {3, 32},
                                                                                  {40, 32},
                                                                                  {1, 64},
                                                                                  {9, 64},
                                                                                  {3, 96},
                                                                                  {3, 128},
                                                                                  {16, 128},
                                                                                  {37, 128},
                                                                                  {3, 512},
                                                                                  {130, 512}})
      for (const int64_t padding : {0, 9, 16}) {
        const Shape shape{kTokens, heads, head_dim};
        Operand x(dtype(), shape, padding), weight(dtype(), Shape{head_dim}), y(dtype(), shape, 2 * padding);
        Operand rstd(DType::f32, Shape{kTokens, heads}), table(DType::f32, Shape{kTokens, 2, head_dim / 2});
        Operand d_y(dtype(), shape, padding), d_x(dtype(), shape, padding), d_weight(DType::f32, Shape{head_dim});
        x.random(1), weight.random(2), d_y.random(3), d_weight.random(4);
        const std::vector<double> frequencies = rope_inverse_frequencies({.head_dim = head_dim});
        const std::string what = fmt::format("{} heads of {} padding {}", heads, head_dim, padding);
        rope_table(device_, position_tensor(), frequencies, 1.0, table);

        rms_norm_rope_forward(device_, x, weight, kEpsilon, table, style, y, rstd);
        const auto norm = ref::rms_norm_forward(x.matrix(), weight.matrix(), kEpsilon);
        const auto expected = ref::rope(norm.y, positions_, frequencies, style, RopeDirection::forward);
        // Where one op follows the other, both round, and channels turn into each other in between.
        const double tolerance = 4 * test::tolerance(dtype());
        expect_close(y.values(), expected.values, tolerance, "y " + what);
        expect_close(rstd, norm.rstd, "rstd " + what);
        EXPECT_TRUE(y.guards_intact());

        const auto turned_back = ref::rope(d_y.matrix(), positions_, frequencies, style, RopeDirection::backward);
        const auto gradients = ref::rms_norm_backward(turned_back, x.matrix(), weight.matrix(), kEpsilon);
        const ref::Matrix d_weight_sum = test::sum(gradients.d_weight, d_weight.matrix());
        rms_norm_rope_backward(device_, d_y, x, weight, rstd, table, style, d_x, d_weight);
        expect_close(d_x.values(), gradients.d_x.values, tolerance, "d_x " + what);
        expect_close(d_weight.values(), d_weight_sum.values, tolerance, "d_weight " + what);
        EXPECT_TRUE(d_x.guards_intact());
        rms_norm_rope_backward(device_, d_y, x, weight, rstd, table, style, d_y, d_weight);
        EXPECT_EQ(d_y.values(), d_x.values()) << "in place, " << what;
      }
}

// So many tokens that a GPU's blocks take several each.
TEST_P(RmsNormRopeTest, ManyTokens) {
  for (const auto& [tokens, heads, head_dim] :
       std::vector<std::array<int64_t, 3>>{{3000, 3, 128}, {9000, 1, 32}, {700, 12, 64}}) {
    const Shape shape{tokens, heads, head_dim};
    Operand x(dtype(), shape), weight(dtype(), Shape{head_dim}), y(dtype(), shape), d_y(dtype(), shape);
    Operand rstd(DType::f32, Shape{tokens, heads}), table(DType::f32, Shape{tokens, 2, head_dim / 2});
    Operand d_x(dtype(), shape), d_weight(DType::f32, Shape{head_dim});
    x.random(1), weight.random(2), d_y.random(3), d_weight.constant(0);
    TestVector<int64_t> numbers;
    for (int64_t t = 0; t < tokens; ++t) numbers.push_back(5 * t);
    const std::vector<double> frequencies = rope_inverse_frequencies({.head_dim = head_dim});
    rope_table(device_, Tensor(numbers.data(), DType::i64, Shape{tokens}), frequencies, 1.0, table);
    // Of so many channels some are five times the level, and rounded before they cancel.
    const double tolerance = 6 * test::tolerance(dtype());
    rms_norm_rope_forward(device_, x, weight, kEpsilon, table, RopeStyle::half_split, y, rstd);
    const auto norm = ref::rms_norm_forward(x.matrix(), weight.matrix(), kEpsilon);
    const auto turned = ref::rope(norm.y, numbers, frequencies, RopeStyle::half_split, RopeDirection::forward);
    expect_close(y.values(), turned.values, tolerance, "y " + shape.str());
    const auto turned_back =
        ref::rope(d_y.matrix(), numbers, frequencies, RopeStyle::half_split, RopeDirection::backward);
    const auto gradients = ref::rms_norm_backward(turned_back, x.matrix(), weight.matrix(), kEpsilon);
    rms_norm_rope_backward(device_, d_y, x, weight, rstd, table, RopeStyle::half_split, d_x, d_weight);
    expect_close(d_x.values(), gradients.d_x.values, tolerance, "d_x " + shape.str());
    expect_close(d_weight.values(), gradients.d_weight.values, tolerance, "d_weight " + shape.str());
  }
}

INSTANTIATE_TEST_SUITE_P(Types, RmsNormRopeTest, testing::Values(DType::f32, DType::bf16), test::type_name);

TEST(RmsNormRope, RefusesWhatDoesNotFit) {
  Device device(test::test_dry_run());
  Operand x(DType::f32, Shape{2, 1, 8}), weight(DType::f32, Shape{8}), rstd(DType::f32, Shape{2, 1});
  Operand table(DType::f32, Shape{2, 2, 4}), short_table(DType::f32, Shape{1, 2, 4}), row(DType::f32, Shape{2, 8});
  EXPECT_THROW(rms_norm_rope_forward(device, x, weight, 1e-6, short_table, RopeStyle::half_split, x, rstd),
               InternalError);
  EXPECT_THROW(rms_norm_rope_forward(device, x, weight, 1e-6, table, RopeStyle::half_split, row, rstd), InternalError);
  EXPECT_THROW(rms_norm_rope_backward(device, x, x, weight, rstd, table, RopeStyle::half_split, x, rstd),
               InternalError);
}

}  // namespace
}  // namespace farspan
