// SPDX-License-Identifier: Apache-2.0
#include "ops/ref/gemm.h"

#include "ops/operand_checks.h"
#include "tensor/fp8.h"

namespace farspan::ref {
namespace {

double element(const GemmOperand& operand, int64_t row, int64_t column) {
  const int64_t offset = row * operand.row_stride + column * operand.column_stride;
  switch (operand.dtype) {
    case DType::f32:
      return static_cast<double>(static_cast<const float*>(operand.data)[offset]);
    case DType::bf16:
      return static_cast<double>(to_float(static_cast<const BFloat16*>(operand.data)[offset]));
    case DType::f8e4m3:
    case DType::f8e5m2:
      return static_cast<double>(
          from_fp8(static_cast<const uint8_t*>(operand.data)[offset], fp8_format(operand.dtype)) * *operand.scale);
    default:
      throw InternalError(fmt::format("gemm: no product of {}", name_of(operand.dtype)));
  }
}

double dot(const GemmProblem& p, int64_t row, int64_t column) {
  double sum = 0;
  for (int64_t i = 0; i < p.k; ++i) sum += element(p.a, row, i) * element(p.b, i, column);
  return sum;
}

template <typename C>
void compute_rows(const GemmProblem& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    C* c = static_cast<C*>(p.c) + row * p.c_row_stride;
    const C* addend = static_cast<const C*>(p.addend) + row * p.addend_row_stride;
    for (int64_t column = 0; column < p.n; ++column) {
      const double before = p.addend != nullptr ? static_cast<double>(to_float(addend[column])) : 0.0;
      c[column] = from_float<C>(static_cast<float>(before + dot(p, row, column)));
    }
  }
}

}  // namespace

void gemm_rows(const GemmProblem& problem, int64_t begin, int64_t end) {
  with_compute_type(problem.c_dtype, [&](auto c) { compute_rows<decltype(c)>(problem, begin, end); });
}

}  // namespace farspan::ref
