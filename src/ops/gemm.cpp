// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm.h"

#include <array>
#include <cstdlib>
#include <cstring>
#include <fmt/format.h>
#include <mutex>
#include <set>
#include <span>

#include "device/parallel_for.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/row_view.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/scratch.h"
#include "ops/operand_checks.h"
#include "ops/ref/gemm.h"

namespace farspan {
namespace {

GemmOutcome run_reference(Device& device, const GemmProblem& problem) {
  parallel_for(device, problem.m, 1, [&](int64_t begin, int64_t end) { ref::gemm_rows(problem, begin, end); });
  return {true, "plain loops"};
}

struct Implementation {
  std::string_view name;
  GemmOutcome (*run)(Device&, const GemmProblem&);
};

constexpr std::array<Implementation, 3> kCpuImplementations{{
    {"onednn", cpu::gemm_onednn},
    {"onednn_widened", cpu::gemm_widened},
    {"reference", run_reference},
}};

constexpr std::array<Implementation, 2> kCudaImplementations{{
    {"cublaslt", cuda::gemm_cublaslt},
    {"reference", cuda::gemm_reference},
}};

std::span<const Implementation> implementations_of(DeviceKind kind) {
  if (kind == DeviceKind::cuda) return kCudaImplementations;
  return kCpuImplementations;
}

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

std::string_view addend_name(const GemmProblem& problem) {
  if (problem.addend == nullptr) return "";
  return problem.addend == problem.c ? " accumulate" : " residual";
}

std::string_view accumulation_name(const GemmProblem& problem) {
  return problem.fast_accumulation ? " fast accumulation" : "";
}

void dispatch(Device& device, const GemmProblem& problem) {
  std::string declined;
  for (const Implementation& implementation : implementations_of(device.kind())) {
    const GemmOutcome outcome = implementation.run(device, problem);
    if (!verbose()) {
      if (outcome.ran) return;
      continue;
    }
    if (!outcome.ran) {
      declined += fmt::format("; {} declined: {}", implementation.name, outcome.detail);
      continue;
    }
    print_once(fmt::format("farspan: gemm {} x {} -> {} m={} n={} k={} a{} b{}{}{}: {} ({}){}",
                           name_of(problem.a.dtype), name_of(problem.b.dtype), name_of(problem.c_dtype), problem.m,
                           problem.n, problem.k, problem.a.column_stride == 1 ? "" : "^T",
                           problem.b.column_stride == 1 ? "" : "^T", addend_name(problem), accumulation_name(problem),
                           implementation.name, outcome.detail, declined));
    return;
  }
}

// The addend, or zero, becomes c.
void start_rows(const GemmProblem& problem, int64_t begin, int64_t end) {
  const int64_t element = size_of(problem.c_dtype);
  const auto bytes = static_cast<size_t>(problem.n * element);
  for (int64_t row = begin; row < end; ++row) {
    char* const c = static_cast<char*>(problem.c) + row * problem.c_row_stride * element;
    if (problem.addend == nullptr)
      std::memset(c, 0, bytes);
    else
      std::memcpy(c, static_cast<const char*>(problem.addend) + row * problem.addend_row_stride * element, bytes);
  }
}

// CPU implementations add to c, so an addend that lies elsewhere is copied there first.
void run_on_cpu(Device& device, GemmProblem problem) {
  const bool only_start = problem.k == 0;
  if (problem.addend != problem.c && (problem.addend != nullptr || only_start)) {
    parallel_for(device, problem.m, cpu::row_grain(problem.n),
                 [&](int64_t begin, int64_t end) { start_rows(problem, begin, end); });
    problem.addend = problem.c;
    problem.addend_row_stride = problem.c_row_stride;
  }
  if (!only_start) dispatch(device, problem);
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
int64_t row_stride_of(const Tensor& tensor) { return tensor.dim(0) == 1 ? tensor.dim(1) : tensor.stride(0); }

GemmOperand operand_of(const Tensor& tensor, Transpose transpose) {
  const int64_t row_stride = row_stride_of(tensor);
  if (transpose == Transpose::yes) return {tensor.raw(), 1, row_stride, tensor.dtype()};
  return {tensor.raw(), row_stride, 1, tensor.dtype()};
}

// Sets c's part of the problem, and runs it.
void run_problem(Device& device, OpCost cost, GemmProblem problem, const Tensor& c, const Tensor* addend) {
  problem.c = c.raw();
  problem.c_row_stride = row_stride_of(c);
  problem.c_dtype = c.dtype();
  if (addend != nullptr) {
    problem.addend = addend->raw();
    problem.addend_row_stride = row_stride_of(*addend);
  }
  cost.flops = 2.0 * static_cast<double>(problem.m) * static_cast<double>(problem.n) * static_cast<double>(problem.k);
  cost.bytes += static_cast<double>((addend != nullptr ? 2 : 1) * c.bytes());
  cost.scratch_bytes = device.targets_cuda() ? cuda::kGemmScratchBytes : 0;
  device.run(cost, [&] {
    if (problem.m == 0 || problem.n == 0) return;
    if (device.on_cuda()) return dispatch(device, problem);
    run_on_cpu(device, problem);
  });
}

// `addend`: null, or of c's shape and type.
void run_gemm(Device& device, std::string_view op, const OperandNames& names, const Tensor& a, Transpose transpose_a,
              const Tensor& b, Transpose transpose_b, const Tensor& c, const Tensor* addend) {
  check_operands(op, names, a, transpose_a, b, transpose_b, c);
  GemmProblem problem;
  problem.m = c.dim(0);
  problem.n = c.dim(1);
  problem.k = a.dim(transpose_a == Transpose::yes ? 0 : 1);
  problem.a = operand_of(a, transpose_a);
  problem.b = operand_of(b, transpose_b);
  const OpCost cost = {.op = op, .op_class = OpClass::gemm, .bytes = static_cast<double>(a.bytes() + b.bytes())};
  run_problem(device, cost, problem, c, addend);
}

// One operand of a product of two matrices in fp8: the copy whose rows lie along the summed dimension.
struct Fp8Operand {
  std::string_view name;
  const Tensor& rows;
  const Tensor& scale;
};

enum class Accumulation { fast, exact };  // of fp8 products (ops/gemm.h)

// c (M, N) = a.rows (M, K) b.rows (N, K)^T
void run_fp8(Device& device, std::string_view op, Accumulation accumulation, const Fp8Operand& a, const Fp8Operand& b,
             std::string_view c_name, const Tensor& c, const Tensor* addend) {
  for (const Fp8Operand& operand : {a, b}) {
    FARSPAN_CHECK(operand.rows.defined(), "{}: {} has no copy along the summed dimension", op, operand.name);
    FARSPAN_CHECK(is_fp8(operand.rows.dtype()), "{}: {} holds {}, expected f8e4m3 or f8e5m2", op, operand.name,
                  name_of(operand.rows.dtype()));
    check_rank(op, operand.name, operand.rows, 2, 2);
    check_contiguous(op, operand.name, operand.rows);
    check_dtype(op, operand.name, operand.scale, DType::f32);
  }
  FARSPAN_CHECK(a.rows.dim(1) == b.rows.dim(1) && a.rows.dim(1) % kFp8Multiple == 0,
                "{}: {} {} and {} {}: expected one inner size, a multiple of {}", op, a.name, a.rows.shape().str(),
                b.name, b.rows.shape().str(), kFp8Multiple);
  check_operand(op, c_name, c);
  check_shape(op, c_name, c, Shape({a.rows.dim(0), b.rows.dim(0)}));
  GemmProblem problem;
  problem.m = c.dim(0);
  problem.n = c.dim(1);
  problem.k = a.rows.dim(1);
  problem.a = operand_of(a.rows, Transpose::no);
  problem.b = operand_of(b.rows, Transpose::yes);
  problem.a.scale = a.scale.data<float>();
  problem.b.scale = b.scale.data<float>();
  problem.fast_accumulation = accumulation == Accumulation::fast;
  const double bytes = static_cast<double>(a.rows.bytes() + b.rows.bytes());
  run_problem(device, {.op = op, .op_class = OpClass::gemm_fp8, .bytes = bytes}, problem, c, addend);
}

void check_residual(const Tensor& residual, const Tensor& y) {
  check_dtype("linear_forward", "residual", residual, y.dtype());
  check_shape("linear_forward", "residual", residual, y.shape());
  check_dense_rows("linear_forward", "residual", residual);
}

const Tensor* addend_of(const Tensor& c, Accumulate accumulate) { return accumulate == Accumulate::yes ? &c : nullptr; }

}  // namespace

void gemm(Device& device, const Tensor& a, Transpose transpose_a, const Tensor& b, Transpose transpose_b, Tensor c,
          Accumulate accumulate) {
  run_gemm(device, "gemm", {"a", "b", "c"}, a, transpose_a, b, transpose_b, c, addend_of(c, accumulate));
}

void linear_forward(Device& device, const Tensor& x, const Tensor& weight, Tensor y) {
  run_gemm(device, "linear_forward", {"x", "weight", "y"}, x, Transpose::no, weight, Transpose::yes, y, nullptr);
}

void linear_forward(Device& device, const Tensor& x, const Tensor& weight, const Tensor& residual, Tensor y) {
  check_residual(residual, y);
  run_gemm(device, "linear_forward", {"x", "weight", "y"}, x, Transpose::no, weight, Transpose::yes, y, &residual);
}

void linear_backward_input(Device& device, const Tensor& d_y, const Tensor& weight, Tensor d_x, Accumulate accumulate) {
  run_gemm(device, "linear_backward_input", {"d_y", "weight", "d_x"}, d_y, Transpose::no, weight, Transpose::no, d_x,
           addend_of(d_x, accumulate));
}

void linear_backward_weight(Device& device, const Tensor& d_y, const Tensor& x, Tensor d_weight,
                            Accumulate accumulate) {
  check_dtype("linear_backward_weight", "d_weight", d_weight, DType::f32);
  run_gemm(device, "linear_backward_weight", {"d_y", "x", "d_weight"}, d_y, Transpose::yes, x, Transpose::no, d_weight,
           addend_of(d_weight, accumulate));
}

void linear_forward(Device& device, const Fp8Matrix& x, const Fp8Matrix& weight, Tensor y) {
  run_fp8(device, "fp8_linear_forward", Accumulation::fast, {"x", x.values, x.scale},
          {"weight", weight.values, weight.scale}, "y", y, nullptr);
}

void linear_forward(Device& device, const Fp8Matrix& x, const Fp8Matrix& weight, const Tensor& residual, Tensor y) {
  check_residual(residual, y);
  run_fp8(device, "fp8_linear_forward", Accumulation::fast, {"x", x.values, x.scale},
          {"weight", weight.values, weight.scale}, "y", y, &residual);
}

void linear_backward_input(Device& device, const Fp8Matrix& d_y, const Fp8Matrix& weight, Tensor d_x,
                           Accumulate accumulate) {
  run_fp8(device, "fp8_linear_backward_input", Accumulation::exact, {"d_y", d_y.values, d_y.scale},
          {"weight", weight.transposed, weight.scale}, "d_x", d_x, addend_of(d_x, accumulate));
}

void linear_backward_weight(Device& device, const Fp8Matrix& d_y, const Fp8Matrix& x, Tensor d_weight,
                            Accumulate accumulate) {
  check_dtype("fp8_linear_backward_weight", "d_weight", d_weight, DType::f32);
  run_fp8(device, "fp8_linear_backward_weight", Accumulation::exact, {"d_y", d_y.transposed, d_y.scale},
          {"x", x.transposed, x.scale}, "d_weight", d_weight, addend_of(d_weight, accumulate));
}

void set_gemm_choice(Device& device, GemmChoice choice) {
  if (device.on_cuda()) cuda::set_gemm_choice(device, choice);
}

std::vector<std::string> gemm_implementations(DeviceKind kind) {
  std::vector<std::string> names;
  for (const Implementation& implementation : implementations_of(kind)) names.emplace_back(implementation.name);
  return names;
}

}  // namespace farspan
