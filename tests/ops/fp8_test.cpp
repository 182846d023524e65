// SPDX-License-Identifier: Apache-2.0
#include "ops/fp8.h"

#include <cmath>
#include <map>

#include "base/math.h"
#include "ops/cuda/ops.h"
#include "ops/gemm.h"
#include "ops/swiglu.h"
#include "tests/ops/operand.h"

namespace farspan {
namespace {

using test::Operand;
using test::TestVector;

constexpr DType kFormats[] = {DType::f8e4m3, DType::f8e5m2};

// --- The formats, against their definition. ---

// Of the finite patterns of one sign: value -> bits.
std::map<double, int> values_of(DType dtype) {
  const int mantissa_bits = dtype == DType::f8e4m3 ? 3 : 2, bias = dtype == DType::f8e4m3 ? 7 : 15;
  std::map<double, int> values;
  for (int bits = 0; bits < 128; ++bits) {
    const int exponent = bits >> mantissa_bits, mantissa = bits % (1 << mantissa_bits);
    if (dtype == DType::f8e4m3 ? bits == 127 : exponent == 31) continue;
    const double fraction = static_cast<double>(mantissa) / (1 << mantissa_bits);
    values[exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias)] = bits;
  }
  return values;
}

// Nearest, ties to the even pattern, at most the largest.
int rounded(const std::map<double, int>& values, double magnitude) {
  const auto above = values.lower_bound(magnitude);
  if (above == values.end()) return values.rbegin()->second;
  if (above == values.begin() || above->first == magnitude) return above->second;
  const auto below = std::prev(above);
  const double down = magnitude - below->first, up = above->first - magnitude;
  if (down != up) return down < up ? below->second : above->second;
  return below->second % 2 == 0 ? below->second : above->second;
}

TEST(Fp8, EveryPatternHasItsValue) {
  for (const DType dtype : kFormats) {
    const Fp8Format& format = fp8_format(dtype);
    for (const auto& [value, bits] : values_of(dtype)) {
      EXPECT_EQ(static_cast<double>(from_fp8(static_cast<uint8_t>(bits), format)), value);
      EXPECT_EQ(static_cast<double>(from_fp8(static_cast<uint8_t>(bits | 128), format)), -value);
      EXPECT_EQ(to_fp8(static_cast<float>(value), format), bits);
    }
    EXPECT_EQ(static_cast<double>(format.largest), values_of(dtype).rbegin()->first);
    EXPECT_TRUE(std::isnan(from_fp8(0x7f, format)));
    EXPECT_EQ(to_fp8(NAN, format), 0x7f);
    EXPECT_EQ(to_fp8(-INFINITY, format), 128 | values_of(dtype).rbegin()->second);
  }
  EXPECT_TRUE(std::isinf(from_fp8(0x7c, kE5M2)));
  EXPECT_EQ(from_fp8(0x7e, kE4M3), 448.0f);
}

TEST(Fp8, RoundsToNearestTiesToEven) {
  for (const DType dtype : kFormats) {
    const std::map<double, int> values = values_of(dtype);
    for (int exponent = -24; exponent <= 18; ++exponent)
      for (int mantissa = 0; mantissa < 256; ++mantissa) {
        const double x = std::ldexp(1 + mantissa / 256.0, exponent);
        ASSERT_EQ(to_fp8(static_cast<float>(x), fp8_format(dtype)), rounded(values, x)) << name_of(dtype) << " " << x;
        ASSERT_EQ(to_fp8(static_cast<float>(-x), fp8_format(dtype)), 128 | rounded(values, x));
      }
  }
}

// The largest value lands in the upper half of the format's range and never above it.
TEST(Fp8, ScaleFitsTheLargestValue) {
  for (const DType dtype : kFormats) {
    const Fp8Format& format = fp8_format(dtype);
    for (int exponent = -126; exponent <= 127; ++exponent)
      for (const float fraction : {1.0f, 1.5f, 1.75f, 1.7578125f, 1.99f}) {
        const float largest = std::ldexp(fraction, exponent);
        const int e = fp8_scale_exponent(std::bit_cast<uint32_t>(largest), format.largest_exponent);
        const float scaled = std::ldexp(largest, e);
        ASSERT_LE(scaled, format.largest) << largest;
        ASSERT_TRUE(e == 126 || 2 * scaled > format.largest) << largest;
      }
  }
  EXPECT_EQ(fp8_scale_exponent(0, 8), 0);
}

// --- The op. ---

// A matrix in fp8 with its own storage. Every look at it waits for the device, so what is read is read as a whole.
class OwnFp8 {
 public:
  OwnFp8(DType dtype, int64_t rows, int64_t columns, bool values = true, bool transposed = true) {
    const int64_t padded = round_up(rows, kFp8Multiple);
    values_.assign(static_cast<size_t>(rows * columns), 0xee);
    transposed_.assign(static_cast<size_t>(padded * columns), 0xee);
    if (values) matrix_.values = Tensor(values_.data(), dtype, Shape{rows, columns});
    if (transposed) matrix_.transposed = Tensor(transposed_.data(), dtype, Shape{columns, padded});
    matrix_.scale = Tensor(scale_.data(), DType::f32, Shape{1});
  }
  const Fp8Matrix& matrix() const { return matrix_; }
  float scale() const {
    test::wait_for_test_device();
    return scale_[0];
  }
  std::vector<uint8_t> values() const {  // (rows, columns)
    test::wait_for_test_device();
    return {values_.begin(), values_.end()};
  }
  std::vector<uint8_t> transposed() const {  // (columns, padded rows)
    test::wait_for_test_device();
    return {transposed_.begin(), transposed_.end()};
  }
  // As products see it.
  ref::Matrix rounded() const {
    ref::Matrix result(matrix_.values.dim(0), matrix_.values.dim(1));
    const std::vector<uint8_t> bits = values();
    const Fp8Format& format = fp8_format(matrix_.values.dtype());
    const double factor = static_cast<double>(scale());
    for (size_t i = 0; i < bits.size(); ++i) result.values[i] = static_cast<double>(from_fp8(bits[i], format)) * factor;
    return result;
  }

 private:
  TestVector<uint8_t> values_, transposed_;
  TestVector<float> scale_ = TestVector<float>(1, 0.0f);
  Fp8Matrix matrix_;
};

class Fp8Op : public testing::TestWithParam<DType> {
 protected:
  Device device_{test::test_device_kind(), 2};
};

TEST_P(Fp8Op, BothCopiesHoldTheRoundedValues) {
  const std::map<double, int> known = values_of(GetParam());
  const int64_t sizes[][3] = {{1, 16, 0}, {17, 48, 0}, {128, 64, 16}, {131, 208, 3}, {300, 80, 8}};
  for (const auto& [rows, columns, padding] : sizes)
    for (const double deviation : {1e-30, 0.02, 3.0, 1e20}) {
      Operand x(DType::bf16, Shape{rows, columns}, padding);
      x.random(7, deviation);
      OwnFp8 copy(GetParam(), rows, columns);
      fp8_quantise(device_, x, copy.matrix());
      const ref::Matrix exact = x.matrix();
      double largest = 0;
      for (const double value : exact.values) largest = std::max(largest, std::abs(value));
      const double scale = static_cast<double>(copy.scale());
      ASSERT_EQ(std::exp2(std::round(std::log2(scale))), scale) << "no power of two";
      ASSERT_LE(largest / scale, known.rbegin()->first);
      ASSERT_GT(2 * largest / scale, known.rbegin()->first);
      const std::vector<uint8_t> values = copy.values(), transposed = copy.transposed();
      const int64_t padded = round_up(rows, kFp8Multiple);
      for (int64_t r = 0; r < padded; ++r)
        for (int64_t c = 0; c < columns; ++c) {
          const int across = transposed[static_cast<size_t>(c * padded + r)];
          if (r >= rows) {
            ASSERT_EQ(across, 0) << "row " << r;
            continue;
          }
          const double value = exact.at(r, c);
          const int expected = rounded(known, std::abs(value) / scale) | (std::signbit(value) ? 128 : 0);
          ASSERT_EQ(values[static_cast<size_t>(r * columns + c)], expected)
              << rows << " x " << columns << " at " << r << ", " << c;
          ASSERT_EQ(across, expected);
        }
    }
}

TEST_P(Fp8Op, OneCopyAloneIsTheSame) {
  Operand x(DType::bf16, Shape{37, 96});
  x.random(3);
  OwnFp8 both(GetParam(), 37, 96), values(GetParam(), 37, 96, true, false), transposed(GetParam(), 37, 96, false, true);
  fp8_quantise(device_, x, both.matrix());
  fp8_quantise(device_, x, values.matrix());
  fp8_quantise(device_, x, transposed.matrix());
  EXPECT_EQ(values.scale(), both.scale());
  EXPECT_EQ(transposed.scale(), both.scale());
  EXPECT_EQ(values.values(), both.values());
  EXPECT_EQ(transposed.transposed(), both.transposed());
}

// Several matrices measured at once, of other sizes, one of them empty, one with rows apart and one not aligned.
TEST_P(Fp8Op, TheLargestMagnitudeOfEachMatrix) {
  Operand wide(DType::bf16, Shape{37, 160}), small(DType::bf16, Shape{3, 16}), flat(DType::bf16, Shape{1 + 5 * 48});
  Operand amax(DType::f32, Shape{4});
  wide.random(5, 3), small.random(6, 0.01), flat.random(7, 40), amax.constant(1e30);
  const Tensor part = wide.tensor().slice(1, 32, 96);
  const Tensor unaligned = flat.tensor().slice(0, 1, 1 + 5 * 48).reshape({5, 48});
  const Tensor none = small.tensor().slice(0, 0, 0);
  largest_magnitudes(device_, std::vector<Tensor>{part, none, small, unaligned}, amax);
  const auto largest = [](const Tensor& x) {
    double most = 0;
    for (const double value : ref::matrix_of(x).values) most = std::max(most, std::abs(value));
    return most;
  };
  const std::vector<double> found = amax.values();
  EXPECT_EQ(found[0], largest(part));
  EXPECT_EQ(found[1], 0);
  EXPECT_EQ(found[2], largest(small));
  EXPECT_EQ(found[3], largest(unaligned));
}

// The largest magnitude that the op which wrote x left.
TEST_P(Fp8Op, AKnownAmaxGivesTheSameBits) {
  for (const int64_t rows : {int64_t{1}, int64_t{133}}) {
    Operand gate_up(DType::bf16, Shape{rows, 160}), x(DType::bf16, Shape{rows, 80}), amax(DType::f32, Shape{1});
    gate_up.random(5, 3), amax.constant(1e30);
    swiglu_forward(device_, gate_up, x, amax);
    OwnFp8 found(GetParam(), rows, 80), known(GetParam(), rows, 80);
    fp8_quantise(device_, x, found.matrix());
    fp8_quantise(device_, x, amax, known.matrix());
    EXPECT_EQ(known.scale(), found.scale()) << rows << " rows";
    EXPECT_EQ(known.values(), found.values()) << rows << " rows";
    EXPECT_EQ(known.transposed(), found.transposed()) << rows << " rows";
  }
}

TEST_P(Fp8Op, ZerosStayZeroAndWhatIsNotFiniteShows) {
  Operand zeros(DType::bf16, Shape{5, 16}), weight(DType::bf16, Shape{16, 16});
  zeros.constant(0);
  weight.random(1);
  OwnFp8 x(GetParam(), 5, 16), w(DType::f8e4m3, 16, 16);
  fp8_quantise(device_, zeros, x.matrix());
  fp8_quantise(device_, weight, w.matrix());
  EXPECT_EQ(x.scale(), 1.0f);
  Operand y(DType::f32, Shape{5, 16});
  linear_forward(device_, x.matrix(), w.matrix(), y);
  EXPECT_EQ(y.values(), std::vector<double>(80, 0.0));
  for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
    Operand one_bad(DType::bf16, Shape{5, 16});
    one_bad.set([&](int64_t i) { return i == 77 ? bad : 1.0; });
    fp8_quantise(device_, one_bad, x.matrix());
    linear_forward(device_, x.matrix(), w.matrix(), y);
    for (const double value : y.values()) ASSERT_TRUE(std::isnan(value)) << bad;
  }
}

// A matrix cut in two is rounded as the whole is, where values are normal numbers of the format under either scale.
TEST_P(Fp8Op, APartIsRoundedAsTheWhole) {
  Operand whole(DType::bf16, Shape{64, 32}), part(DType::bf16, Shape{32, 32});
  const auto value = [](int64_t i) { return (i % 7 == 0 ? -1 : 1) * std::exp2(static_cast<double>(i % 11) - 5) * 1.3; };
  whole.set([&](int64_t i) { return value(i) * (i < 32 * 32 ? 1 : 64); });
  part.set(value);
  OwnFp8 of_whole(GetParam(), 64, 32), of_part(GetParam(), 32, 32);
  fp8_quantise(device_, whole, of_whole.matrix());
  fp8_quantise(device_, part, of_part.matrix());
  EXPECT_NE(of_whole.scale(), of_part.scale());
  const double smallest = static_cast<double>(of_whole.scale()) / 64;  // normal number of f8e4m3
  const ref::Matrix whole_values = of_whole.rounded(), part_values = of_part.rounded();
  for (int64_t r = 0; r < 32; ++r)
    for (int64_t c = 0; c < 32; ++c) {
      const double found = part_values.at(r, c);
      if (GetParam() == DType::f8e4m3 && std::abs(found) < smallest) continue;
      ASSERT_EQ(whole_values.at(r, c), found) << r << ", " << c;
    }
}

// Of a product, relative to the fp64 sum of the same rounded matrices (test::tolerance says to what).
//   f32 on a GPU  2^-9: Hopper's matrix units align the 32 products of an instruction and the sum before it to the
//   largest
//                 of these and cut them off 13 to 14 bits below it, without fast accumulation too (DeepSeek-V3, 2024,
//                 section 3.3.2). Arithmetic like that, cut at 13 bits, on the shapes and values below strays by at
//                 most 1.5e-3. One product of 272 left out or taken twice would show as some 6e-2.
//   bf16 on one   the last rounding and the above; added to something, one rounding more (ops/gemm.h), of a product
//   that
//                 may be larger than the sum
double tolerance_of(DType result, bool adds) {
  if (!test::testing_cuda()) return test::tolerance(result);
  return result == DType::f32 ? 1.0 / 512 : (adds ? 4 : 2) * test::tolerance(result);
}

// The three products of a linear layer: x and weight in f8e4m3, d_y in the parameter's format.
TEST_P(Fp8Op, ProductsAreThoseOfTheRoundedMatrices) {
  const int64_t sizes[][3] = {{16, 32, 48}, {37, 64, 80}, {1, 16, 16}, {200, 272, 144}};
  for (const auto& [tokens, in, out] : sizes)
    for (const DType result : {DType::f32, DType::bf16}) {
      Operand x(DType::bf16, Shape{tokens, in}, 3), weight(DType::bf16, Shape{out, in}),
          d_y(DType::bf16, Shape{tokens, out});
      x.random(1, 2), weight.random(2, 0.02), d_y.random(3, 1e-4);
      OwnFp8 x8(DType::f8e4m3, tokens, in), w8(DType::f8e4m3, out, in), d8(GetParam(), tokens, out);
      fp8_quantise(device_, x, x8.matrix());
      fp8_quantise(device_, weight, w8.matrix());
      fp8_quantise(device_, d_y, d8.matrix());
      Operand y(result, Shape{tokens, out}, 8), residual(result, Shape{tokens, out}), d_x(result, Shape{tokens, in});
      Operand d_weight(DType::f32, Shape{out, in});
      residual.random(4, 0.1), d_x.random(5, 1e-4), d_weight.random(6, 1e-4);
      ref::Matrix y_expected(tokens, out), y_sum = residual.matrix(), d_x_sum = d_x.matrix(),
                                           d_w_sum = d_weight.matrix();
      ref::Matrix d_x_expected(tokens, in), d_w_expected(out, in);
      const ref::Matrix x_values = x8.rounded(), w_values = w8.rounded(), d_values = d8.rounded();
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t o = 0; o < out; ++o)
          for (int64_t i = 0; i < in; ++i) {
            y_expected.at(t, o) += x_values.at(t, i) * w_values.at(o, i);
            d_x_expected.at(t, i) += d_values.at(t, o) * w_values.at(o, i);
            d_w_expected.at(o, i) += d_values.at(t, o) * x_values.at(t, i);
          }
      const auto close = [&](const Operand& found, const ref::Matrix& expected, bool adds, const char* what) {
        test::expect_close(found.values(), expected.values, tolerance_of(found.tensor().dtype(), adds), what);
        EXPECT_TRUE(found.guards_intact()) << what;
      };
      linear_forward(device_, x8.matrix(), w8.matrix(), y);
      close(y, y_expected, false, "y");
      linear_forward(device_, x8.matrix(), w8.matrix(), residual, y);
      close(y, test::sum(y_sum, y_expected), true, "y with residual");
      linear_backward_input(device_, d8.matrix(), w8.matrix(), d_x, Accumulate::yes);
      close(d_x, test::sum(d_x_sum, d_x_expected), true, "d_x added to");
      linear_backward_input(device_, d8.matrix(), w8.matrix(), d_x, Accumulate::no);
      close(d_x, d_x_expected, false, "d_x");
      linear_backward_weight(device_, d8.matrix(), x8.matrix(), d_weight, Accumulate::yes);
      close(d_weight, test::sum(d_w_sum, d_w_expected), true, "d_weight added to");
      linear_backward_weight(device_, d8.matrix(), x8.matrix(), d_weight, Accumulate::no);
      close(d_weight, d_w_expected, false, "d_weight");
    }
}

// A rank that was dealt no tokens.
TEST_P(Fp8Op, NoTokens) {
  Operand weight(DType::bf16, Shape{32, 16}), d_weight(DType::f32, Shape{32, 16});
  weight.random(1), d_weight.constant(3);
  TestVector<uint8_t> room(64);
  const auto empty = [&](int64_t columns) {
    return Fp8Matrix{.values = Tensor(room.data(), GetParam(), Shape{0, columns}),
                     .transposed = Tensor(room.data(), GetParam(), Shape{columns, 0}),
                     .scale = Tensor(room.data(), DType::f32, Shape{1})};
  };
  const Tensor nothing(room.data(), DType::bf16, Shape{0, 16}), no_gradient(room.data(), DType::bf16, Shape{0, 32});
  OwnFp8 w8(DType::f8e4m3, 32, 16);
  fp8_quantise(device_, weight, w8.matrix());
  const Fp8Matrix x = empty(16), d_y = empty(32);
  fp8_quantise(device_, nothing, x);
  linear_forward(device_, x, w8.matrix(), no_gradient);
  linear_backward_input(device_, d_y, w8.matrix(), nothing, Accumulate::no);
  linear_backward_weight(device_, d_y, x, d_weight, Accumulate::yes);
  EXPECT_EQ(d_weight.values(), std::vector<double>(512, 3.0));
  linear_backward_weight(device_, d_y, x, d_weight, Accumulate::no);
  EXPECT_EQ(d_weight.values(), std::vector<double>(512, 0.0));
}

TEST_P(Fp8Op, RefusesWhatDoesNotFit) {
  Operand x(DType::bf16, Shape{4, 24}), wide(DType::f32, Shape{4, 32}), fine(DType::bf16, Shape{4, 32});
  OwnFp8 odd(GetParam(), 4, 24), even(GetParam(), 4, 32), values(GetParam(), 4, 32, true, false);
  EXPECT_THROW(fp8_quantise(device_, x, odd.matrix()), InternalError);
  EXPECT_THROW(fp8_quantise(device_, wide, even.matrix()), InternalError);
  EXPECT_THROW(fp8_quantise(device_, x, even.matrix()), InternalError);
  EXPECT_THROW(fp8_quantise(device_, fine, Fp8Matrix{.values = {}, .transposed = {}, .scale = even.matrix().scale}),
               InternalError);
  Operand y(DType::f32, Shape{4, 4}), d_weight(DType::f32, Shape{32, 32});
  EXPECT_THROW(linear_backward_weight(device_, values.matrix(), values.matrix(), d_weight, Accumulate::no),
               InternalError);
  EXPECT_THROW(linear_forward(device_, even.matrix(), even.matrix(), d_weight), InternalError);
}

INSTANTIATE_TEST_SUITE_P(Formats, Fp8Op, testing::ValuesIn(kFormats), test::type_name);

}  // namespace
}  // namespace farspan
