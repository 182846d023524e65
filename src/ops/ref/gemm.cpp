// SPDX-License-Identifier: Apache-2.0
#include "ops/ref/gemm.h"

#include "ops/operand_checks.h"

namespace farspan::ref {
namespace {

template <typename T>
double dot(const GemmProblem& p, int64_t row, int64_t column) {
  const T* a = static_cast<const T*>(p.a.data) + row * p.a.row_stride;
  const T* b = static_cast<const T*>(p.b.data) + column * p.b.column_stride;
  double sum = 0;
  for (int64_t i = 0; i < p.k; ++i)
    sum +=
        static_cast<double>(to_float(a[i * p.a.column_stride])) * static_cast<double>(to_float(b[i * p.b.row_stride]));
  return sum;
}

template <typename T, typename C>
void compute_rows(const GemmProblem& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    C* c = static_cast<C*>(p.c) + row * p.c_row_stride;
    const C* addend = static_cast<const C*>(p.addend) + row * p.addend_row_stride;
    for (int64_t column = 0; column < p.n; ++column) {
      const double before = p.addend != nullptr ? static_cast<double>(to_float(addend[column])) : 0.0;
      c[column] = from_float<C>(static_cast<float>(before + dot<T>(p, row, column)));
    }
  }
}

}  // namespace

void gemm_rows(const GemmProblem& problem, int64_t begin, int64_t end) {
  with_compute_type(problem.operand_dtype, [&](auto t) {
    with_compute_type(problem.c_dtype, [&](auto c) { compute_rows<decltype(t), decltype(c)>(problem, begin, end); });
  });
}

}  // namespace farspan::ref
