// SPDX-License-Identifier: Apache-2.0
#include "ops/swiglu.h"

#include <limits>

#include "ops/ref/layers.h"
#include "tests/ops/operand.h"

namespace farspan {
namespace {

using test::expect_close;
using test::Operand;

class SwiGluTest : public test::BothTypes {};

TEST_P(SwiGluTest, MatchesReference) {
  for (const int64_t tokens : {1, 3, 17})
    for (const int64_t width : {1, 10, 257, 768})
      for (const int64_t padding : {0, 6, 16}) {
        Operand gate_up(dtype(), Shape{tokens, 2 * width}, padding), y(dtype(), Shape{tokens, width}, 2 * padding);
        Operand d_y(dtype(), Shape{tokens, width}, padding), d_gate_up(dtype(), Shape{tokens, 2 * width}, 3 * padding);
        gate_up.random(1, 3), d_y.random(2);
        const auto expected_y = ref::swiglu_forward(gate_up.matrix());
        const auto expected_d = ref::swiglu_backward(gate_up.matrix(), d_y.matrix());
        const std::string what = fmt::format("tokens {} width {} padding {}", tokens, width, padding);
        Operand amax(DType::f32, Shape{1}), d_amax(DType::f32, Shape{1});
        amax.constant(1e30);  // is overwritten
        swiglu_forward(device_, gate_up, y, amax);
        expect_close(y, expected_y, "y " + what);
        EXPECT_EQ(amax.values()[0], test::largest_magnitude(y)) << what;
        swiglu_backward(device_, gate_up, d_y, d_gate_up);
        expect_close(d_gate_up, expected_d, "d_gate_up " + what);
        Operand again(dtype(), Shape{tokens, 2 * width}, padding), copy(dtype(), Shape{tokens, width}, padding);
        again.random(1, 3), copy.random(2);
        swiglu_backward(device_, gate_up, d_y, gate_up);  // in place
        EXPECT_EQ(gate_up.values(), d_gate_up.values()) << what;
        amax.constant(1e30), d_amax.constant(1e30);
        swiglu_backward_and_output(device_, again, copy, again, copy, d_amax, amax);  // both in place
        EXPECT_EQ(again.values(), d_gate_up.values()) << what;
        EXPECT_EQ(copy.values(), y.values()) << what;
        EXPECT_EQ(amax.values()[0], test::largest_magnitude(y)) << what;
        EXPECT_EQ(d_amax.values()[0], test::largest_magnitude(d_gate_up)) << what;
        EXPECT_TRUE(copy.guards_intact()) << what;
      }
}

// Gates far out on both sides: the sigmoid saturates, nothing overflows.
TEST_P(SwiGluTest, SaturatedGates) {
  Operand gate_up(dtype(), Shape{1, 12}), y(dtype(), Shape{1, 6}), d_y(dtype(), Shape{1, 6}), d(dtype(), Shape{1, 12});
  gate_up.set({-1000, -90, -30, 30, 90, 1000, 1, 1, 1, 1, 1, 1});
  d_y.constant(1);
  swiglu_forward(device_, gate_up, y);
  swiglu_backward(device_, gate_up, d_y, d);
  const std::vector<double> expected = ref::swiglu_forward(gate_up.matrix()).values;
  for (size_t i = 0; i < 6; ++i) EXPECT_NEAR(y.values()[i], expected[i], 1e-12 + 0.004 * std::abs(expected[i])) << i;
  const std::vector<double> expected_d = ref::swiglu_backward(gate_up.matrix(), d_y.matrix()).values;
  for (size_t i = 0; i < 12; ++i)
    EXPECT_NEAR(d.values()[i], expected_d[i], 1e-11 + 0.004 * std::abs(expected_d[i])) << i;
}

TEST_P(SwiGluTest, NaNStaysInItsElement) {
  Operand gate_up(dtype(), Shape{1, 20}), y(dtype(), Shape{1, 10});
  gate_up.random(1).set([&](int64_t i) { return i == 4 ? std::nan("") : static_cast<double>(i); });
  Operand amax(DType::f32, Shape{1});
  swiglu_forward(device_, gate_up, y, amax);
  for (size_t i = 0; i < 10; ++i) EXPECT_EQ(std::isnan(y.values()[i]), i == 4) << i;
  EXPECT_TRUE(std::isnan(amax.values()[0]));
}

INSTANTIATE_TEST_SUITE_P(Types, SwiGluTest, testing::Values(DType::f32, DType::bf16), test::type_name);

TEST(SwiGlu, ReferenceBackwardIsTheDerivative) {
  Operand gate_up(DType::f32, Shape{3, 20}), d_y(DType::f32, Shape{3, 10});
  gate_up.random(1, 2), d_y.random(2);
  expect_close(ref::swiglu_backward(gate_up.matrix(), d_y.matrix()).values,
               test::numeric_gradient(gate_up.matrix(), d_y.matrix(), ref::swiglu_forward), test::kNumericTolerance,
               "d_gate_up");
}

TEST(SwiGlu, RefusesOddWidth) {
  Device device(test::test_dry_run());
  Operand gate_up(DType::f32, Shape{2, 5}), y(DType::f32, Shape{2, 2});
  EXPECT_THROW(swiglu_forward(device, gate_up, y), InternalError);
}

}  // namespace
}  // namespace farspan
