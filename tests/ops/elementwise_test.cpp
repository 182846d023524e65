// SPDX-License-Identifier: Apache-2.0
#include "ops/elementwise.h"

#include <limits>
#include <memory>

#include "ops/norms.h"
#include "tests/ops/operand.h"

namespace farspan {
namespace {

using test::expect_close;
using test::Operand;
using test::TestVector;

double squares_of(Device& device, const Tensor& x) {
  test::Sum sum;
  sum_of_squares(device, x, sum);
  return sum.value();
}

const std::vector<Shape> kShapes = {{17}, {3, 10}, {1, 257}, {5, 3, 7}, {2, 3, 5, 4}, {5003}, {9, 6, 64}, {3, 5000}};
// Elements between the outermost entries: none, too few for wide accesses, a multiple of them.
constexpr int64_t kPaddings[] = {0, 3, 16};

class ElementwiseTest : public test::BothTypes {};

TEST_P(ElementwiseTest, AddMatchesReference) {
  for (const DType other : {DType::f32, DType::bf16})
    for (const Shape& shape : kShapes)
      for (const int64_t padding : kPaddings) {
        Operand a(dtype(), shape, padding), b(other, shape, 2 * padding), y(dtype(), shape);
        a.random(1), b.random(2);
        const ref::Matrix expected = test::sum(a.matrix(), b.matrix());
        add(device_, a, b, y);
        expect_close(y, expected, "y " + shape.str());
        add(device_, a, b, a);  // y = a
        EXPECT_EQ(a.values(), y.values());
        EXPECT_TRUE(a.guards_intact());
      }
}

TEST_P(ElementwiseTest, CastRoundsAsToBFloat16) {
  for (const DType to : {DType::f32, DType::bf16})
    for (const Shape& shape : kShapes)
      for (const int64_t padding : kPaddings) {
        Operand x(dtype(), shape, padding), y(to, shape, 2 * padding);
        x.random(1);
        cast(device_, x, y);
        const std::vector<double> from = x.values(), found = y.values();
        for (size_t i = 0; i < from.size(); ++i) {
          const float value = static_cast<float>(from[i]);
          const float expected = to == DType::f32 ? value : to_float(to_bfloat16(value));
          ASSERT_EQ(found[i], static_cast<double>(expected)) << shape.str() << " element " << i;
        }
        EXPECT_TRUE(y.guards_intact());
      }
}

TEST_P(ElementwiseTest, FillSetsEveryElementAndNoOther) {
  for (const Shape& shape : kShapes)
    for (const int64_t padding : kPaddings) {
      Operand x(dtype(), shape, padding);
      fill(device_, x, 1.5);
      EXPECT_EQ(x.values(), std::vector<double>(static_cast<size_t>(shape.numel()), 1.5));
      EXPECT_TRUE(x.guards_intact());
    }
}

// Heads cut out of fused rows, two of the outer dimensions swapped, and one row for all: no two dimensions merge.
TEST_P(ElementwiseTest, StridedInEveryDimension) {
  Operand from(dtype(), Shape{3, 4, 10, 32}), to(DType::f32, Shape{3, 4, 8, 24});
  from.random(1), to.constant(0);
  const auto part = [](const Tensor& tensor) { return tensor.slice(2, 1, 6).slice(3, 8, 24); };
  const auto swapped = [](const Tensor& tensor) {
    return Tensor(tensor.raw(), tensor.dtype(), Shape{tensor.dim(1), tensor.dim(0), tensor.dim(2), tensor.dim(3)},
                  Shape{tensor.stride(1), tensor.stride(0), tensor.stride(2), tensor.stride(3)});
  };
  cast(device_, swapped(part(from)), swapped(part(to)));
  const std::vector<double> source = from.values(), found = to.values();
  for (size_t i = 0; i < found.size(); ++i) {
    const size_t column = i % 24, row = i / 24 % 8, outer = i / (24 * 8);
    const bool inside = column >= 8 && row >= 1 && row < 6;
    ASSERT_EQ(found[i], inside ? source[(outer * 10 + row) * 32 + column] : 0) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, ElementwiseTest, testing::Values(DType::f32, DType::bf16), test::type_name);

TEST(Elementwise, CastOfSpecialValues) {
  Device device(test::test_device_kind(), 1);
  // Ties on both sides of even, the largest fp32 (rounds to inf), inf, NaN with only low bits set, denormals; 9
  // elements, so that the last go through the partial vector.
  const std::vector<uint32_t> bits = {0x3f808000, 0x3f818000, 0x3f808001, 0x7f7fffff, 0x7f800000,
                                      0x7f800001, 0xff800000, 0x00008000, 0xffffffff};
  TestVector<float> x(9);
  std::memcpy(x.data(), bits.data(), 36);
  TestVector<BFloat16> y(9);
  cast(device, Tensor(x.data(), DType::f32, Shape{9}), Tensor(y.data(), DType::bf16, Shape{9}));
  device.synchronize();
  for (size_t i = 0; i < 9; ++i) EXPECT_EQ(y[i].bits, to_bfloat16(x[i]).bits) << i;
}

TEST(Elementwise, FillAndCopyIntegers) {
  Device device(test::test_device_kind(), 1);
  TestVector<int64_t> x(10), y(10);
  const Tensor tx(x.data(), DType::i64, Shape{10}), ty(y.data(), DType::i64, Shape{10});
  fill(device, tx, -3);
  cast(device, tx, ty);
  device.synchronize();
  EXPECT_EQ(y, TestVector<int64_t>(10, -3));
  TestVector<int32_t> z(4);
  const Tensor tz(z.data(), DType::i32, Shape{4});
  fill(device, tz, -1);
  device.synchronize();
  EXPECT_EQ(z, TestVector<int32_t>(4, -1));
  EXPECT_THROW(fill(device, tz, 0.5), InternalError);
  EXPECT_THROW(fill(device, tz, 2147483648.0), InternalError);
  EXPECT_THROW(cast(device, tx, tz), InternalError);
}

TEST(Elementwise, ScaleAndSumOfSquares) {
  Device device(test::test_device_kind(), 2);
  for (const int64_t n : {1, 3, 257, 200001}) {
    Operand x(DType::f32, Shape{n});
    x.random(1);
    double expected = 0;
    for (double value : x.values()) expected += value * value;
    EXPECT_NEAR(squares_of(device, x), expected, 1e-13 * expected) << n;
    scale(device, x, -2);
    EXPECT_NEAR(squares_of(device, x), 4 * expected, 4e-13 * expected) << n;
  }
  Operand rows(DType::f32, Shape{3, 10}, 4);
  rows.constant(3);
  scale(device, rows, 0.5);
  EXPECT_EQ(rows.values(), std::vector<double>(30, 1.5));
  EXPECT_TRUE(rows.guards_intact());
}

// One call over many tensors, some of them nothing and some at odd addresses; what was in the sum stays.
TEST(Elementwise, SumOfSquaresOfManyTensors) {
  Device device(test::test_device_kind(), 2);
  std::vector<std::unique_ptr<Operand>> operands;
  std::vector<Tensor> tensors;
  double expected = 7;
  for (int64_t i = 0; i < 150; ++i) {
    const int64_t n = i % 50 == 3 ? 70001 : i * i % 257;
    operands.push_back(std::make_unique<Operand>(DType::f32, Shape{n + 1}));
    operands.back()->random(static_cast<uint64_t>(i));
    tensors.push_back(operands.back()->tensor().slice(0, i % 2, n));
    const std::vector<double> values = operands.back()->values();
    for (int64_t e = i % 2; e < n; ++e) expected += values[static_cast<size_t>(e)] * values[static_cast<size_t>(e)];
  }
  test::Sum all, again, one_by_one;
  for (test::Sum* sum : {&all, &again, &one_by_one}) sum->set(7);
  sum_of_squares(device, tensors, all);
  sum_of_squares(device, tensors, again);
  for (const Tensor& tensor : tensors) sum_of_squares(device, tensor, one_by_one);
  EXPECT_NEAR(all.value(), expected, 1e-12 * expected);
  EXPECT_NEAR(one_by_one.value(), expected, 1e-12 * expected);
  EXPECT_EQ(all.value(), again.value());
  if (!test::testing_cuda()) {
    EXPECT_EQ(all.value(), one_by_one.value());
  }
  sum_of_squares(device, std::span<const Tensor>(), all);
  EXPECT_EQ(all.value(), again.value());
}

TEST(Elementwise, SumOfSquaresNeitherOverflowsNorHides) {
  Device device(test::test_device_kind(), 1);
  Operand x(DType::f32, Shape{1000});
  x.constant(2e22);  // its square overflows fp32
  EXPECT_NEAR(squares_of(device, x) / 4e47, 1.0, 1e-6);
  for (const double broken : {std::nan(""), std::numeric_limits<double>::infinity()})
    for (const int64_t place : {0, 500, 999}) {
      x.set([&](int64_t i) { return i == place ? broken : 1.0; });
      EXPECT_FALSE(std::isfinite(squares_of(device, x))) << place;
    }
}

TEST(Elementwise, B106_ElementCountsPast32Bits) {
  EXPECT_EQ((Shape{65536, 50304}.numel()), 3296722944);
  EXPECT_EQ((Shape{64, 1024, 50257}.numel()), 3293642752);
  EXPECT_EQ(Tensor(nullptr, DType::f32, Shape{65536, 50304}).bytes(), 4 * int64_t{3296722944});
}

TEST(Elementwise, B107_RowsTwoToTheThirtyElementsApart) {
  Device device(test::test_device_kind(), 2);
  const int64_t row_stride = int64_t{1} << 30, columns = 67;
  const test::SparseMemory memory((2 * row_stride + columns) * 4);
  const Tensor far(memory.data(), DType::f32, Shape{3, columns}, Shape{row_stride, 1});
  Operand x(DType::f32, Shape{3, columns}), back(DType::f32, Shape{3, columns}),
      rounded(DType::bf16, Shape{3, columns});
  x.random(1);
  cast(device, x, far);
  cast(device, far, back);
  EXPECT_EQ(back.bytes(), x.bytes());
  EXPECT_EQ(
      std::memcmp(static_cast<char*>(memory.data()) + 2 * row_stride * 4, x.tensor().slice(0, 2, 3).raw(), columns * 4),
      0);
  cast(device, far, rounded);
  add(device, far, far, far);
  scale(device, far, 0.5);
  device.synchronize();
  EXPECT_EQ(ref::matrix_of(far).values, x.values());
}

TEST(Elementwise, RefusesWhatDoesNotFit) {
  Device device(test::test_dry_run());
  Operand a(DType::f32, Shape{2, 3}), b(DType::f32, Shape{3, 2});
  EXPECT_THROW(add(device, a, b, a), InternalError);
  EXPECT_THROW(cast(device, a, b), InternalError);
  const Tensor transposed(a.tensor().raw(), DType::f32, Shape{3, 2}, Shape{1, 3});
  EXPECT_THROW(cast(device, transposed, b), InternalError);
  test::Sum total;
  const Tensor strided(a.tensor().raw(), DType::f32, Shape{2, 2}, Shape{3, 1});
  EXPECT_THROW(sum_of_squares(device, strided, total), InternalError);
  EXPECT_THROW(sum_of_squares(device, a, b), InternalError);
}

}  // namespace
}  // namespace farspan
