// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm.h"

#include <algorithm>
#include <tuple>

#include "ops/cpu/gemm.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/scratch.h"
#include "ops/ref/gemm.h"
#include "tests/ops/operand.h"

namespace farspan {
namespace {

using test::expect_close;
using test::Operand;

struct Types {
  DType operands, result;
};

ref::Matrix product(const ref::Matrix& a, bool ta, const ref::Matrix& b, bool tb, const ref::Matrix& start) {
  ref::Matrix c = start;
  const int64_t depth = ta ? a.rows : a.columns;
  for (int64_t i = 0; i < c.rows; ++i)
    for (int64_t j = 0; j < c.columns; ++j)
      for (int64_t k = 0; k < depth; ++k) c.at(i, j) += (ta ? a.at(k, i) : a.at(i, k)) * (tb ? b.at(j, k) : b.at(k, j));
  return c;
}

// Where something is added to a bf16 product, a GPU rounds the product first (ops/gemm.h), which may be some times as
// large as the sum.
double tolerance_of(DType result, bool adds) {
  return test::tolerance(result) * (result == DType::bf16 && adds && test::testing_cuda() ? 4 : 1);
}

void expect_close(const Operand& found, const ref::Matrix& expected, bool adds, const std::string& what) {
  test::expect_close(found.values(), expected.values, tolerance_of(found.tensor().dtype(), adds), what);
  EXPECT_TRUE(found.guards_intact()) << what << ": an element outside the view was written";
}

class GemmTest : public testing::TestWithParam<Types> {
 protected:
  void compare(int64_t m, int64_t n, int64_t k, bool ta, bool tb, Accumulate accumulate, int64_t padding) {
    Operand a(GetParam().operands, ta ? Shape{k, m} : Shape{m, k}, padding);
    Operand b(GetParam().operands, tb ? Shape{n, k} : Shape{k, n}, 2 * padding);
    Operand c(GetParam().result, Shape{m, n}, 3 * padding);
    a.random(1), b.random(2), c.random(3);
    const bool adds = accumulate == Accumulate::yes;
    const ref::Matrix expected = product(a.matrix(), ta, b.matrix(), tb, adds ? c.matrix() : ref::Matrix(m, n));
    gemm(device_, a, ta ? Transpose::yes : Transpose::no, b, tb ? Transpose::yes : Transpose::no, c, accumulate);
    const std::string what =
        fmt::format("({}, {}, {}) ta {} tb {} accumulate {} padding {}", m, n, k, ta, tb, adds, padding);
    expect_close(c, expected, adds, what);
    if (test::testing_cuda()) compare_cuda_reference(a, ta, b, tb, c, expected, adds, what);
  }

  // The library takes nearly everything, so what takes the rest is called by name.
  void compare_cuda_reference(const Operand& a, bool ta, const Operand& b, bool tb, Operand& c,
                              const ref::Matrix& expected, bool adds, const std::string& what) {
    const auto operand = [](const Tensor& tensor, bool transposed) {
      return transposed ? GemmOperand{tensor.raw(), 1, tensor.stride(0)}
                        : GemmOperand{tensor.raw(), tensor.stride(0), 1};
    };
    const Tensor& result = c.tensor();
    GemmProblem problem;
    problem.m = result.dim(0);
    problem.n = result.dim(1);
    problem.k = a.tensor().dim(ta ? 0 : 1);
    problem.a = operand(a.tensor(), ta);
    problem.b = operand(b.tensor(), tb);
    problem.a.dtype = problem.b.dtype = GetParam().operands;
    problem.c = result.raw();
    problem.c_row_stride = result.stride(0);
    problem.c_dtype = GetParam().result;
    if (adds) {
      problem.addend = problem.c;
      problem.addend_row_stride = problem.c_row_stride;
    }
    c.random(3);
    EXPECT_TRUE(cuda::gemm_reference(device_, problem).ran);
    expect_close(c, expected, false, what + ", reference");
  }

  Device device_{test::test_device_kind(), 2};
};

TEST_P(GemmTest, MatchesReference) {
  const int64_t sizes[][3] = {{1, 1, 1}, {3, 10, 17}, {17, 257, 10}, {64, 48, 96}, {1, 257, 33}, {33, 1, 7}, {5, 9, 1}};
  for (const auto& [m, n, k] : sizes)
    for (const bool ta : {false, true})
      for (const bool tb : {false, true})
        for (const Accumulate accumulate : {Accumulate::no, Accumulate::yes})
          for (const int64_t padding : {0, 5}) compare(m, n, k, ta, tb, accumulate, padding);
}

// Past the tile edge of the widened product in every dimension.
TEST_P(GemmTest, MatchesReferenceAcrossTiles) {
  compare(1031, 7, 19, false, true, Accumulate::yes, 3);
  compare(9, 1030, 11, true, false, Accumulate::no, 3);
  compare(5, 6, 2600, false, false, Accumulate::yes, 0);
  compare(1027, 1029, 3, true, true, Accumulate::no, 1);
}

TEST_P(GemmTest, EmptySizes) {
  Operand c(GetParam().result, Shape{2, 3}, 1);
  c.constant(7);
  const Tensor a(nullptr, GetParam().operands, Shape{2, 0}), b(nullptr, GetParam().operands, Shape{0, 3});
  gemm(device_, a, Transpose::no, b, Transpose::no, c, Accumulate::yes);
  EXPECT_EQ(c.values(), std::vector<double>(6, 7.0));
  gemm(device_, a, Transpose::no, b, Transpose::no, c, Accumulate::no);
  EXPECT_EQ(c.values(), std::vector<double>(6, 0.0));
  EXPECT_TRUE(c.guards_intact());
  Operand full(GetParam().operands, Shape{4, 3});
  full.random(1);
  const Tensor no_rows(nullptr, GetParam().operands, Shape{0, 4}), no_result(nullptr, GetParam().result, Shape{0, 3});
  gemm(device_, no_rows, Transpose::no, full, Transpose::no, no_result, Accumulate::no);
}

INSTANTIATE_TEST_SUITE_P(Types, GemmTest,
                         testing::Values(Types{DType::f32, DType::f32}, Types{DType::bf16, DType::f32},
                                         Types{DType::bf16, DType::bf16}),
                         [](const auto& types) {
                           return std::string(name_of(types.param.operands)) + "_to_" +
                                  std::string(name_of(types.param.result));
                         });

// The three products of a linear layer are one another's adjoints: <d_y, y(x, w)> = <d_x, x> = <d_w, w>.
class LinearTest : public test::BothTypes {};

TEST_P(LinearTest, ForwardAndBackwardAgree) {
  const int64_t tokens = 17, in = 10, out = 33;
  Operand x(dtype(), Shape{tokens, in}, 2), weight(dtype(), Shape{out, in}), d_y(dtype(), Shape{tokens, out}, 4);
  Operand y(DType::f32, Shape{tokens, out}), d_x(DType::f32, Shape{tokens, in}), d_weight(DType::f32, Shape{out, in});
  x.random(1), weight.random(2), d_y.random(3), d_x.random(4), d_weight.random(5);
  const ref::Matrix d_x_before = d_x.matrix(), d_weight_before = d_weight.matrix();

  linear_forward(device_, x, weight, y);
  linear_backward_input(device_, d_y, weight, d_x, Accumulate::yes);
  linear_backward_weight(device_, d_y, x, d_weight, Accumulate::yes);
  expect_close(y, product(x.matrix(), false, weight.matrix(), true, ref::Matrix(tokens, out)), "y");
  expect_close(d_x, product(d_y.matrix(), false, weight.matrix(), false, d_x_before), "d_x");
  expect_close(d_weight, product(d_y.matrix(), true, x.matrix(), false, d_weight_before), "d_weight");

  linear_backward_input(device_, d_y, weight, d_x, Accumulate::no);
  expect_close(d_x, product(d_y.matrix(), false, weight.matrix(), false, ref::Matrix(tokens, in)), "d_x overwritten");
  linear_backward_weight(device_, d_y, x, d_weight, Accumulate::no);
  expect_close(d_weight, product(d_y.matrix(), true, x.matrix(), false, ref::Matrix(out, in)), "d_weight overwritten");
}

// The residual is added before the one rounding, from elsewhere or from y itself, whatever the distance of their rows.
TEST_P(LinearTest, ForwardAddsResidual) {
  const int64_t tokens = 34, in = 48;
  for (const int64_t out : {40, 33})
    for (const DType y_dtype : {dtype(), DType::f32})
      for (const int64_t padding : {0, 8, 3}) {
        Operand x(dtype(), Shape{tokens, in}), weight(dtype(), Shape{out, in});
        Operand y(y_dtype, Shape{tokens, out}, padding), residual(y_dtype, Shape{tokens, out}, 2 * padding);
        x.random(1), weight.random(2), residual.random(3), y.random(4);
        const std::string what = fmt::format("{} out, {}, padding {}", out, name_of(y_dtype), padding);
        linear_forward(device_, x, weight, residual, y);
        expect_close(y, product(x.matrix(), false, weight.matrix(), true, residual.matrix()), true, what);
        EXPECT_TRUE(residual.guards_intact()) << what;
        const ref::Matrix before = y.matrix();
        linear_forward(device_, x, weight, y, y);
        expect_close(y, product(x.matrix(), false, weight.matrix(), true, before), true, what + ", in place");
      }
}
INSTANTIATE_TEST_SUITE_P(Types, LinearTest, testing::Values(DType::f32, DType::bf16), test::type_name);

// c (m, n) = a b of dense operands.
GemmProblem dense_problem(int64_t m, int64_t n, int64_t k, DType operands, const void* a, const void* b, DType result,
                          void* c) {
  GemmProblem problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.a = {a, k, 1};
  problem.b = {b, n, 1};
  problem.a.dtype = problem.b.dtype = operands;
  problem.c = c;
  problem.c_row_stride = n;
  problem.c_dtype = result;
  return problem;
}

// Every implementation that takes a problem computes the same product; the reference, which takes all, does too.
TEST(Gemm, ImplementationsAgree) {
  EXPECT_EQ(gemm_implementations(DeviceKind::cpu), (std::vector<std::string>{"onednn", "onednn_widened", "reference"}));
  if (test::testing_cuda()) GTEST_SKIP() << "the implementations of a CPU";
  Device device(DeviceKind::cpu, 2);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Operand a(dtype, Shape{17, 40}), b(dtype, Shape{40, 23});
    a.random(1), b.random(2);
    const ref::Matrix expected = product(a.matrix(), false, b.matrix(), false, ref::Matrix(17, 23));
    for (const auto run : {cpu::gemm_onednn, cpu::gemm_widened}) {
      Operand c(DType::f32, Shape{17, 23});
      const GemmProblem problem =
          dense_problem(17, 23, 40, dtype, a.tensor().raw(), b.tensor().raw(), DType::f32, c.tensor().raw());
      const GemmOutcome outcome = run(device, problem);
      EXPECT_FALSE(outcome.detail.empty());
      if (outcome.ran) expect_close(c, expected, outcome.detail);
      // On x86-64 one of the two library paths always runs.
      const bool must_run = run == (dtype == DType::f32 ? cpu::gemm_onednn : cpu::gemm_widened);
      EXPECT_TRUE(outcome.ran || !must_run) << outcome.detail;
      c.constant(0);
      ref::gemm_rows(problem, 0, 17);
      expect_close(c, expected, "reference");
    }
  }
}

// Large enough for the library's algorithms to be timed, which must not show in the result.
TEST(Gemm, CudaImplementationsAgree) {
  EXPECT_EQ(gemm_implementations(DeviceKind::cuda), (std::vector<std::string>{"cublaslt", "reference"}));
  if (!test::testing_cuda()) GTEST_SKIP() << "the implementations of a GPU";
  const int64_t m = 1024, n = 2560, k = 2048;
  for (const DType operands : {DType::f32, DType::bf16}) {
    Device reference(DeviceKind::cuda, 1);
    Operand a(operands, Shape{m, k}), b(operands, Shape{k, n}), before(operands, Shape{m, n}, 8);
    a.random(1), b.random(2), before.random(3, 30);
    Operand alone(DType::f32, Shape{m, n});
    EXPECT_TRUE(cuda::gemm_reference(reference, dense_problem(m, n, k, operands, a.tensor().raw(), b.tensor().raw(),
                                                              DType::f32, alone.tensor().raw()))
                    .ran);
    const ref::Matrix sum = alone.matrix(), added = test::sum(sum, before.matrix());
    for (const DType result : {operands, DType::f32})
      for (const GemmChoice choice : {GemmChoice::timed, GemmChoice::heuristic})
        for (const Accumulate accumulate : {Accumulate::no, Accumulate::yes}) {
          Device device(DeviceKind::cuda, 1);
          set_gemm_choice(device, choice);
          Operand c(result, Shape{m, n}, 8);
          c.set(before.values());
          gemm(device, a, Transpose::no, b, Transpose::no, c, accumulate);
          const bool adds = accumulate == Accumulate::yes;
          // Sums of 2048 terms in two orders.
          const double relative = result == DType::f32 ? 5e-5 : tolerance_of(result, adds);
          expect_close(c.values(), (adds ? added : sum).values, relative,
                       fmt::format("{} to {}, {}", name_of(operands), name_of(result), adds ? "accumulate" : ""));
          EXPECT_TRUE(c.guards_intact());
        }
  }
}

// More than 2^31 elements of the result: the last of them is where it belongs.
TEST(Gemm, CudaPastTwoToThe31) {
  if (!test::testing_cuda()) GTEST_SKIP() << "takes a GPU";
  constexpr int64_t kM = 16384 + 3, kN = 131072 + 8, kK = 16;
  Device device(DeviceKind::cuda, 1);
  Operand a(DType::bf16, Shape{kM, kK}), b(DType::bf16, Shape{kN, kK});
  a.random(1), b.random(2);
  const DeviceMemory memory(device, kM * kN * size_of(DType::bf16));
  linear_forward(device, a, b, Tensor(memory.data(), DType::bf16, Shape{kM, kN}));
  const ref::Matrix x = a.matrix(), w = b.matrix();
  for (const auto& [row, column] :
       {std::pair{kM - 1, kN - 1}, std::pair{kM - 1, int64_t{0}}, std::pair{kM / 2, kN / 2}}) {
    BFloat16 found;
    copy_to_host(device, static_cast<const BFloat16*>(memory.data()) + row * kN + column, &found, sizeof(found));
    double expected = 0;
    for (int64_t i = 0; i < kK; ++i) expected += x.at(row, i) * w.at(column, i);
    EXPECT_NEAR(to_float(found), expected, std::max(1.0, std::abs(expected)) / 256) << row << ", " << column;
  }
}

TEST(Gemm, DryDevicePlansTheWorkspace) {
  Device cpu(DryRun{DeviceKind::cpu}), cuda(DryRun{DeviceKind::cuda});
  Operand a(DType::f32, Shape{2, 2}), c(DType::f32, Shape{2, 2});
  for (Device* device : {&cpu, &cuda}) gemm(*device, a, Transpose::no, a, Transpose::no, c, Accumulate::no);
  EXPECT_EQ(cpu.scratch_bytes(), 0);
  EXPECT_EQ(cuda.scratch_bytes(), cuda::kGemmScratchBytes);
}

TEST(Gemm, RefusesWhatDoesNotFit) {
  Device device(test::test_dry_run());
  Operand a(DType::f32, Shape{2, 3}), b(DType::f32, Shape{4, 5}), half(DType::bf16, Shape{3, 5}),
      c(DType::f32, Shape{2, 5});
  EXPECT_THROW(gemm(device, a, Transpose::no, b, Transpose::no, c, Accumulate::no), InternalError);
  EXPECT_THROW(gemm(device, a, Transpose::no, half, Transpose::no, c, Accumulate::no), InternalError);
  const Tensor columns(b.tensor().raw(), DType::f32, Shape{3, 4}, Shape{1, 3});
  Operand d(DType::f32, Shape{2, 4});
  EXPECT_THROW(gemm(device, a, Transpose::no, columns, Transpose::no, d, Accumulate::no), InternalError);
  Operand weight(DType::f32, Shape{5, 3}), other_type(DType::bf16, Shape{2, 5});
  EXPECT_THROW(linear_forward(device, a, weight, other_type, c), InternalError);
  EXPECT_THROW(linear_forward(device, a, weight, d, c), InternalError);
}

}  // namespace
}  // namespace farspan
