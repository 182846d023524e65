// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm.h"

#include <array>
#include <cstdlib>
#include <cstring>
#include <fmt/format.h>
#include <mutex>
#include <set>

#include "device/parallel_for.h"
#include "ops/cpu/gemm_problem.h"
#include "ops/operand_checks.h"
#include "ops/ref/gemm.h"

namespace farspan {
namespace {

using cpu::GemmOutcome;
using cpu::GemmProblem;

GemmOutcome run_reference(Device& device, const GemmProblem& problem) {
  parallel_for(device, problem.m, 1, [&](int64_t begin, int64_t end) { ref::gemm_rows(problem, begin, end); });
  return {true, "plain loops"};
}

struct Implementation {
  std::string_view name;
  GemmOutcome (*run)(Device&, const GemmProblem&);
};

constexpr std::array<Implementation, 3> kImplementations{{
    {"onednn", cpu::gemm_onednn},
    {"onednn_widened", cpu::gemm_widened},
    {"reference", run_reference},
}};

bool verbose() {
  static const bool on = [] {
    const char* value = std::getenv("FARSPAN_VERBOSE");
    return value != nullptr && std::string_view(value) != "" && std::string_view(value) != "0";
  }();
  return on;
}

void print_once(const std::string& line) {
  static std::mutex mutex;
  static std::set<std::string> printed;
  const std::lock_guard lock(mutex);
  if (printed.insert(line).second) fmt::print(stderr, "{}\n", line);
}

void dispatch(Device& device, const GemmProblem& problem) {
  std::string declined;
  for (const Implementation& implementation : kImplementations) {
    const GemmOutcome outcome = implementation.run(device, problem);
    if (!verbose()) {
      if (outcome.ran) return;
      continue;
    }
    if (!outcome.ran) {
      declined += fmt::format("; {} declined: {}", implementation.name, outcome.detail);
      continue;
    }
    print_once(fmt::format("farspan: gemm {} -> {} m={} n={} k={} a{} b{}{}: {} ({}){}", name_of(problem.operand_dtype),
                           name_of(problem.c_dtype), problem.m, problem.n, problem.k,
                           problem.a.column_stride == 1 ? "" : "^T", problem.b.column_stride == 1 ? "" : "^T",
                           problem.accumulate == Accumulate::yes ? " accumulate" : "", implementation.name,
                           outcome.detail, declined));
    return;
  }
}

void zero_rows(const GemmProblem& problem) {
  for (int64_t row = 0; row < problem.m; ++row)
    std::memset(static_cast<char*>(problem.c) + row * problem.c_row_stride * size_of(problem.c_dtype), 0,
                static_cast<size_t>(problem.n * size_of(problem.c_dtype)));
}

void check_operand(std::string_view op, std::string_view operand, const Tensor& tensor) {
  check_compute_dtype(op, operand, tensor);
  check_rank(op, operand, tensor, 2, 2);
  check_dense_rows(op, operand, tensor);
}

// The names are those of the calling op's operands, for its messages.
struct OperandNames {
  std::string_view a, b, c;
};

void check_operands(std::string_view op, const OperandNames& names, const Tensor& a, Transpose transpose_a,
                    const Tensor& b, Transpose transpose_b, const Tensor& c) {
  check_operand(op, names.a, a);
  check_operand(op, names.b, b);
  check_operand(op, names.c, c);
  FARSPAN_CHECK(a.dtype() == b.dtype(), "{}: {} holds {}, {} holds {}; expected one type", op, names.a,
                name_of(a.dtype()), names.b, name_of(b.dtype()));
  FARSPAN_CHECK(c.dtype() == DType::f32 || a.dtype() == DType::bf16, "{}: {} holds bf16, expected f32 as {}", op,
                names.c, names.a);
  const bool ta = transpose_a == Transpose::yes, tb = transpose_b == Transpose::yes;
  FARSPAN_CHECK(a.dim(ta ? 0 : 1) == b.dim(tb ? 1 : 0), "{}: {} {}{} and {} {}{} have different inner sizes", op,
                names.a, a.shape().str(), ta ? "^T" : "", names.b, b.shape().str(), tb ? "^T" : "");
  check_shape(op, names.c, c, Shape({a.dim(ta ? 1 : 0), b.dim(tb ? 0 : 1)}));
}

// The stride of a dimension of size 1 means nothing and may be anything; a dense one is put in its place.
cpu::GemmOperand operand_of(const Tensor& tensor, Transpose transpose) {
  const int64_t row_stride = tensor.dim(0) == 1 ? tensor.dim(1) : tensor.stride(0);
  if (transpose == Transpose::yes) return {tensor.raw(), 1, row_stride};
  return {tensor.raw(), row_stride, 1};
}

void run_gemm(Device& device, std::string_view op, const OperandNames& names, const Tensor& a, Transpose transpose_a,
              const Tensor& b, Transpose transpose_b, const Tensor& c, Accumulate accumulate) {
  check_operands(op, names, a, transpose_a, b, transpose_b, c);
  GemmProblem problem;
  problem.m = c.dim(0);
  problem.n = c.dim(1);
  problem.k = a.dim(transpose_a == Transpose::yes ? 0 : 1);
  problem.a = operand_of(a, transpose_a);
  problem.b = operand_of(b, transpose_b);
  problem.operand_dtype = a.dtype();
  problem.c = c.raw();
  problem.c_row_stride = c.dim(0) == 1 ? c.dim(1) : c.stride(0);
  problem.c_dtype = c.dtype();
  problem.accumulate = accumulate;

  const double flops =
      2.0 * static_cast<double>(problem.m) * static_cast<double>(problem.n) * static_cast<double>(problem.k);
  const int64_t c_passes = accumulate == Accumulate::yes ? 2 : 1;
  const double bytes = static_cast<double>(a.bytes() + b.bytes() + c_passes * c.bytes());
  device.run({op, OpClass::gemm, flops, bytes}, [&] {
    if (problem.m == 0 || problem.n == 0) return;
    if (problem.k == 0) {
      if (accumulate == Accumulate::no) zero_rows(problem);
      return;
    }
    dispatch(device, problem);
  });
}

}  // namespace

void gemm(Device& device, const Tensor& a, Transpose transpose_a, const Tensor& b, Transpose transpose_b, Tensor c,
          Accumulate accumulate) {
  run_gemm(device, "gemm", {"a", "b", "c"}, a, transpose_a, b, transpose_b, c, accumulate);
}

void linear_forward(Device& device, const Tensor& x, const Tensor& weight, Tensor y) {
  run_gemm(device, "linear_forward", {"x", "weight", "y"}, x, Transpose::no, weight, Transpose::yes, y, Accumulate::no);
}

void linear_backward_input(Device& device, const Tensor& d_y, const Tensor& weight, Tensor d_x, Accumulate accumulate) {
  run_gemm(device, "linear_backward_input", {"d_y", "weight", "d_x"}, d_y, Transpose::no, weight, Transpose::no, d_x,
           accumulate);
}

void linear_backward_weight(Device& device, const Tensor& d_y, const Tensor& x, Tensor d_weight) {
  check_dtype("linear_backward_weight", "d_weight", d_weight, DType::f32);
  run_gemm(device, "linear_backward_weight", {"d_y", "x", "d_weight"}, d_y, Transpose::yes, x, Transpose::no, d_weight,
           Accumulate::yes);
}

std::vector<std::string> gemm_implementations() {
  std::vector<std::string> names;
  for (const Implementation& implementation : kImplementations) names.emplace_back(implementation.name);
  return names;
}

}  // namespace farspan
