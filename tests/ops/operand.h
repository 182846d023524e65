// SPDX-License-Identifier: Apache-2.0
// Operands for op tests: a tensor with its own storage, whose rows may lie apart with guard values between them, and
// the comparison of a result with its fp64 reference.
#pragma once

#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "base/philox.h"
#include "device/device.h"
#include "ops/ref/matrix.h"
#include "tensor/tensor.h"
#include "tests/device.h"

namespace farspan::test {

class Operand {
 public:
  // `padding`: guard elements after each entry of the outermost dimension. They hold NaN (all bits set), so reading one
  // shows in the result and writing one shows in guards_intact().
  Operand(DType dtype, const Shape& shape, int64_t padding = 0) {
    const int64_t outer = shape[0];
    const int64_t inner = outer == 0 ? 0 : shape.numel() / outer;
    Shape strides = shape;
    int64_t step = 1;
    for (int d = shape.rank() - 1; d > 0; --d) {
      strides[d] = step;
      step *= shape[d];
    }
    strides[0] = shape.rank() == 1 ? 1 : inner + padding;
    period_ = shape.rank() == 1 ? outer : inner + padding;
    inner_ = shape.rank() == 1 ? outer : inner;
    bytes_.assign(static_cast<size_t>((shape.rank() == 1 ? outer + padding : outer * period_) * size_of(dtype)), 0xff);
    tensor_ = Tensor(bytes_.data(), dtype, shape, strides);
  }
  Operand(const Operand& other) = delete;
  Operand& operator=(const Operand&) = delete;

  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }  // NOLINT: used wherever a tensor is

  // Normal values times `deviation`, rounded to the dtype.
  Operand& random(uint64_t seed, double deviation = 1) {
    const Philox philox(seed, "operand");
    return set([&](int64_t i) { return deviation * philox.normal(static_cast<uint64_t>(i)); });
  }
  Operand& constant(double value) {
    return set([&](int64_t) { return value; });
  }
  // value(i) for the element with row-major index i.
  template <typename Value>
  Operand& set(const Value& value) {
    wait_for_test_device();
    for (int64_t i = 0; i < tensor_.numel(); ++i) put(offset_of(i), value(i));
    return *this;
  }
  Operand& set(const std::vector<double>& values) {
    return set([&](int64_t i) { return values.at(static_cast<size_t>(i)); });
  }

  // What the ops so far have left; these wait for them.
  ref::Matrix matrix() const {
    wait_for_test_device();
    return ref::matrix_of(tensor_);
  }
  std::vector<double> values() const { return matrix().values; }
  std::vector<uint8_t> bytes() const {
    wait_for_test_device();
    return {bytes_.begin(), bytes_.end()};
  }

  bool guards_intact() const {
    wait_for_test_device();
    const int64_t element = size_of(tensor_.dtype());
    const int64_t period = std::max<int64_t>(1, period_ * element);
    for (size_t i = 0; i < bytes_.size(); ++i)
      if (static_cast<int64_t>(i) % period >= inner_ * element && bytes_[i] != 0xff) return false;
    return true;
  }

 private:
  int64_t offset_of(int64_t index) const {
    int64_t offset = 0;
    for (int d = tensor_.rank() - 1; d >= 0; --d) {
      offset += index % tensor_.dim(d) * tensor_.stride(d);
      index /= tensor_.dim(d);
    }
    return offset;
  }
  void put(int64_t offset, double value) {
    switch (tensor_.dtype()) {
      case DType::f32:
        tensor_.data<float>()[offset] = static_cast<float>(value);
        break;
      case DType::bf16:
        tensor_.data<BFloat16>()[offset] = to_bfloat16(static_cast<float>(value));
        break;
      case DType::f64:
        tensor_.data<double>()[offset] = value;
        break;
      case DType::i32:
        tensor_.data<int32_t>()[offset] = static_cast<int32_t>(value);
        break;
      case DType::i64:
        tensor_.data<int64_t>()[offset] = static_cast<int64_t>(value);
        break;
      default:
        FAIL() << "no test values for this dtype";
    }
  }

  TestVector<uint8_t> bytes_;
  Tensor tensor_;
  int64_t period_ = 0, inner_ = 0;
};

// The one f64 that a summing op adds to.
class Sum {
 public:
  operator Tensor() { return {value_.data(), DType::f64, Shape{1}}; }  // NOLINT: used wherever a tensor is
  double value() const {
    wait_for_test_device();
    return value_[0];
  }
  void set(double value) { value_[0] = value; }

 private:
  TestVector<double> value_ = TestVector<double>(1, 0.0);
};

// How far a result may lie from the fp64 reference, relative to the larger of its value and the root mean square of the
// whole result (which carries the rounding of sums whose terms cancel).
//   f32   1e-5: some 100 roundings of 6e-8, the longest fp32 sums in these tests
//   bf16  2^-8: one rounding of the result is 2^-9; fp32 in between adds next to nothing
inline double tolerance(DType dtype) { return dtype == DType::f32 ? 1e-5 : 1.0 / 256; }

inline void expect_close(const std::vector<double>& found, const std::vector<double>& expected, double relative,
                         const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  double squares = 0;
  for (double value : expected) squares += value * value;
  const double level = std::sqrt(squares / static_cast<double>(std::max<size_t>(1, expected.size())));
  for (size_t i = 0; i < found.size(); ++i) {
    const double allowed = relative * std::max(std::abs(expected[i]), level);
    ASSERT_LE(std::abs(found[i] - expected[i]), allowed)
        << what << ": element " << i << " is " << found[i] << ", expected " << expected[i];
  }
}

inline void expect_close(const Operand& found, const ref::Matrix& expected, const std::string& what) {
  expect_close(found.values(), expected.values, tolerance(found.tensor().dtype()), what);
  EXPECT_TRUE(found.guards_intact()) << what << ": an element outside the view was written";
}

// What an op's amax must hold for this result of it: bits, not a tolerance.
inline double largest_magnitude(const Operand& result) {
  double largest = 0;
  for (const double value : result.values()) largest = std::max(largest, std::abs(value));
  return largest;
}

inline ref::Matrix sum(ref::Matrix a, const ref::Matrix& b) {
  for (size_t i = 0; i < a.values.size(); ++i) a.values[i] += b.values.at(i);
  return a;
}

// d(sum of weights * forward(x)) / dx by central differences in fp64. Error about step^2 of the third derivative.
template <typename Forward>
std::vector<double> numeric_gradient(ref::Matrix x, const ref::Matrix& weights, const Forward& forward) {
  constexpr double kStep = 1e-5;
  const auto objective = [&] {
    const ref::Matrix y = forward(x);
    double sum = 0;
    for (size_t i = 0; i < y.values.size(); ++i) sum += y.values[i] * weights.values[i];
    return sum;
  };
  std::vector<double> gradient;
  for (double& value : x.values) {
    const double before = value;
    value = before + kStep;
    const double above = objective();
    value = before - kStep;
    const double below = objective();
    value = before;
    gradient.push_back((above - below) / (2 * kStep));
  }
  return gradient;
}
// Central differences with step 1e-5 in fp64: truncation 1e-10 and cancellation 1e-11 of the value.
constexpr double kNumericTolerance = 1e-7;

// Test suites over both compute dtypes.
class BothTypes : public testing::TestWithParam<DType> {
 protected:
  DType dtype() const { return GetParam(); }
  Device device_{test_device_kind(), 2};
};
inline std::string type_name(const testing::TestParamInfo<DType>& info) { return std::string(name_of(info.param)); }

}  // namespace farspan::test
