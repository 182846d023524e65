// SPDX-License-Identifier: Apache-2.0
#include "ops/rms_norm.h"

#include "ops/ref/layers.h"
#include "tests/ops/operand.h"

namespace farspan {
namespace {

using test::expect_close;
using test::Operand;

constexpr double kEpsilon = 1e-5;

// Token norms (T, H), and head norms (T, A, D) inside a wider row: rows of some lanes of a warp, of a warp, of a block,
// and more than a block holds.
const std::vector<Shape> kShapes = {{1, 10},    {3, 257},   {17, 10},    {70, 33},   {13, 512},  {5, 2048},   {3, 6144},
                                    {1, 20000}, {5, 3, 10}, {17, 4, 16}, {9, 6, 64}, {7, 3, 96}, {21, 5, 128}};
// Elements between rows: none, too few for wide accesses, a multiple of them.
constexpr int64_t kPaddings[] = {0, 7, 16};

Shape rows_of(const Shape& shape) { return shape.rank() == 2 ? Shape{shape[0]} : Shape{shape[0], shape[1]}; }

class RmsNormTest : public test::BothTypes {};

TEST_P(RmsNormTest, ForwardMatchesReference) {
  for (const DType weight_dtype : {DType::f32, dtype()})
    for (const Shape& shape : kShapes)
      for (const int64_t padding : kPaddings) {
        Operand x(dtype(), shape, padding), weight(weight_dtype, Shape{shape[-1]}), y(dtype(), shape, 2 * padding);
        Operand rstd(DType::f32, rows_of(shape));
        x.random(1), weight.random(2);
        rms_norm_forward(device_, x, weight, kEpsilon, y, rstd);
        const auto expected = ref::rms_norm_forward(x.matrix(), weight.matrix(), kEpsilon);
        expect_close(y, expected.y, "y " + shape.str());
        expect_close(rstd, expected.rstd, "rstd " + shape.str());
        Operand amax(DType::f32, Shape{1});
        amax.constant(1e30);                                            // is overwritten
        rms_norm_forward(device_, x, weight, kEpsilon, x, rstd, amax);  // y = x
        EXPECT_EQ(x.values(), y.values()) << "in place, " << shape.str();
        EXPECT_EQ(amax.values()[0], test::largest_magnitude(y)) << shape.str();
      }
}

TEST_P(RmsNormTest, BackwardMatchesReference) {
  for (const Shape& shape : kShapes)
    for (const int64_t padding : kPaddings) {
      Operand x(dtype(), shape, padding), weight(dtype(), Shape{shape[-1]}), d_y(dtype(), shape, 3 * padding);
      Operand y(dtype(), shape), rstd(DType::f32, rows_of(shape));
      Operand d_x(dtype(), shape, padding), d_weight(DType::f32, Shape{shape[-1]});
      x.random(1), weight.random(2), d_y.random(3), d_x.random(4), d_weight.random(5);
      rms_norm_forward(device_, x, weight, kEpsilon, y, rstd);

      const auto expected = ref::rms_norm_backward(d_y.matrix(), x.matrix(), weight.matrix(), kEpsilon);
      const ref::Matrix added = test::sum(expected.d_x, d_x.matrix());
      const ref::Matrix added_weight = test::sum(expected.d_weight, d_weight.matrix());
      rms_norm_backward(device_, d_y, x, weight, rstd, d_x, Accumulate::yes, d_weight);
      expect_close(d_x, added, "d_x added, " + shape.str());
      expect_close(d_weight, added_weight, "d_weight added, " + shape.str());

      d_weight.constant(0);
      rms_norm_backward(device_, d_y, x, weight, rstd, d_y, Accumulate::no, d_weight);  // d_x = d_y
      expect_close(d_y, expected.d_x, "d_x in place, " + shape.str());
      expect_close(d_weight, expected.d_weight, "d_weight, " + shape.str());
    }
}

TEST_P(RmsNormTest, TokenTilesAddUpToTheWhole) {
  Operand x(dtype(), Shape{100, 33}), weight(dtype(), Shape{33}), d_y(dtype(), Shape{100, 33}),
      d_x(dtype(), Shape{100, 33});
  Operand rstd(DType::f32, Shape{100}), d_weight(DType::f32, Shape{33});
  x.random(1), weight.random(2), d_y.random(3), d_weight.constant(0);
  rms_norm_forward(device_, x, weight, kEpsilon, d_x, rstd);
  for (int64_t begin = 0; begin < 100; begin += 30) {
    const int64_t end = std::min<int64_t>(100, begin + 30);
    const auto tile = [&](const Tensor& tensor) { return tensor.slice(0, begin, end); };
    rms_norm_backward(device_, tile(d_y), tile(x), weight, tile(rstd), tile(d_x), Accumulate::no, d_weight);
  }
  const auto expected = ref::rms_norm_backward(d_y.matrix(), x.matrix(), weight.matrix(), kEpsilon);
  expect_close(d_x, expected.d_x, "d_x");
  expect_close(d_weight, expected.d_weight, "d_weight");
}

// More rows than a GPU works on at once, in heads and in whole rows: on a GPU of every width that it takes in another
// way, so many that each block comes back several times to where it keeps rows that are on their way.
TEST_P(RmsNormTest, GradientsOfManyRows) {
  std::vector<Shape> shapes = {{1000, 9, 8}, {1100, 1040}};
  if (test::testing_cuda())
    for (const Shape& wide : {Shape{5001, 1040}, Shape{5001, 2048}, Shape{3000, 2560}, Shape{2600, 4096},
                              Shape{1900, 5120}, Shape{1500, 8192}, Shape{1100, 12288}})
      shapes.push_back(wide);
  for (const Shape& shape : shapes) {
    Operand x(dtype(), shape), weight(dtype(), Shape{shape[-1]}), rstd(DType::f32, rows_of(shape));
    Operand d_weight(DType::f32, Shape{shape[-1]}), again(DType::f32, Shape{shape[-1]});
    x.set([](int64_t i) { return static_cast<double>(i * 7919 % 2039) / 1024 - 1; });
    weight.random(2), d_weight.constant(0), again.constant(0);
    const auto expected = ref::rms_norm_backward(x.matrix(), x.matrix(), weight.matrix(), kEpsilon);
    Operand d_x(dtype(), shape);
    rms_norm_forward(device_, x, weight, kEpsilon, d_x, rstd);
    rms_norm_backward(device_, x, x, weight, rstd, d_x, Accumulate::no, d_weight);
    rms_norm_backward(device_, x, x, weight, rstd, d_x, Accumulate::no, again);
    expect_close(d_weight, expected.d_weight, "d_weight, " + shape.str());
    expect_close(d_x, expected.d_x, "d_x, " + shape.str());
    EXPECT_EQ(d_weight.bytes(), again.bytes()) << shape.str();
    d_x.random(4), again.constant(0);
    const ref::Matrix added = test::sum(expected.d_x, d_x.matrix());
    rms_norm_backward(device_, x, x, weight, rstd, d_x, Accumulate::yes, again);
    expect_close(d_x, added, "d_x added, " + shape.str());
    expect_close(again, expected.d_weight, "d_weight beside it, " + shape.str());
  }
}

INSTANTIATE_TEST_SUITE_P(Types, RmsNormTest, testing::Values(DType::f32, DType::bf16), test::type_name);

TEST(RmsNorm, ReferenceBackwardIsTheDerivative) {
  Operand x(DType::f32, Shape{3, 10}), weight(DType::f32, Shape{10}), d_y(DType::f32, Shape{3, 10});
  x.random(1), weight.random(2), d_y.random(3);
  const auto gradients = ref::rms_norm_backward(d_y.matrix(), x.matrix(), weight.matrix(), kEpsilon);
  const auto by_x = [&](const ref::Matrix& m) { return ref::rms_norm_forward(m, weight.matrix(), kEpsilon).y; };
  const auto by_weight = [&](const ref::Matrix& m) { return ref::rms_norm_forward(x.matrix(), m, kEpsilon).y; };
  expect_close(gradients.d_x.values, test::numeric_gradient(x.matrix(), d_y.matrix(), by_x), test::kNumericTolerance,
               "d_x");
  expect_close(gradients.d_weight.values, test::numeric_gradient(weight.matrix(), d_y.matrix(), by_weight),
               test::kNumericTolerance, "d_weight");
}

// The second row's address is 2^30 elements away, the third's 2^31: beyond 32 bits in bytes and in elements.
TEST(RmsNorm, B107_RowsTwoToTheThirtyElementsApart) {
  Device device(test::test_device_kind(), 2);
  const int64_t row_stride = int64_t{1} << 30, columns = 67;
  const test::SparseMemory memory((2 * row_stride + columns) * 4);
  const Tensor far(memory.data(), DType::f32, Shape{3, columns}, Shape{row_stride, 1});
  Operand x(DType::f32, Shape{3, columns}), weight(DType::f32, Shape{columns}), y(DType::f32, Shape{3, columns});
  Operand rstd(DType::f32, Shape{3}), far_rstd(DType::f32, Shape{3});
  x.random(1), weight.random(2);
  for (int64_t row = 0; row < 3; ++row)
    std::memcpy(far.slice(0, row, row + 1).raw(), x.tensor().slice(0, row, row + 1).raw(), columns * 4);
  rms_norm_forward(device, x, weight, kEpsilon, y, rstd);
  rms_norm_forward(device, far, weight, kEpsilon, far, far_rstd);
  device.synchronize();
  EXPECT_EQ(ref::matrix_of(far).values, y.values());
  EXPECT_EQ(far_rstd.bytes(), rstd.bytes());
}

}  // namespace
}  // namespace farspan
