// SPDX-License-Identifier: Apache-2.0
#include "ops/bias.h"

#include "tests/ops/operand.h"

namespace farspan {
namespace {

using test::expect_close;
using test::Operand;

class BiasTest : public test::BothTypes {};

TEST_P(BiasTest, MatchesReference) {
  for (const DType bias_dtype : {DType::f32, DType::bf16})
    for (const int64_t tokens : {1, 5, 300})
      for (const int64_t width : {1, 10, 257, 768})
        for (const int64_t padding : {0, 7, 16}) {
          const size_t columns = static_cast<size_t>(width);
          Operand y(dtype(), Shape{tokens, width}, padding), bias(bias_dtype, Shape{width});
          Operand d_bias(DType::f32, Shape{width});
          y.random(1), bias.random(2), d_bias.random(3);
          ref::Matrix sum = y.matrix(), d_sum = d_bias.matrix();
          const std::vector<double> added = bias.values();
          for (size_t i = 0; i < sum.values.size(); ++i) {
            d_sum.values[i % columns] += sum.values[i];
            sum.values[i] += added[i % columns];
          }
          const std::string what = fmt::format("({}, {}) padding {}", tokens, width, padding);
          bias_backward(device_, y, d_bias);
          expect_close(d_bias, d_sum, "d_bias of " + what);
          bias_add(device_, bias, y);
          expect_close(y, sum, "y " + what);
        }
}

TEST_P(BiasTest, GradientHasTheSameBitsTwice) {
  Operand d_y(dtype(), Shape{3001, 72}), d_bias(DType::f32, Shape{72}), again(DType::f32, Shape{72});
  d_y.random(1), d_bias.random(2), again.random(2);
  bias_backward(device_, d_y, d_bias);
  bias_backward(device_, d_y, again);
  EXPECT_EQ(d_bias.bytes(), again.bytes());
}

INSTANTIATE_TEST_SUITE_P(Types, BiasTest, testing::Values(DType::f32, DType::bf16), test::type_name);

}  // namespace
}  // namespace farspan
