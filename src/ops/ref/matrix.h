// SPDX-License-Identifier: Apache-2.0
// Matrices of doubles: what the reference operators compute with.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor/tensor.h"

namespace farspan::ref {

struct Matrix {
  Matrix() = default;
  Matrix(int64_t row_count, int64_t column_count)
      : rows(row_count), columns(column_count), values(static_cast<size_t>(row_count * column_count)) {}

  double& at(int64_t row, int64_t column) { return values[static_cast<size_t>(row * columns + column)]; }
  double at(int64_t row, int64_t column) const { return values[static_cast<size_t>(row * columns + column)]; }

  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<double> values;  // row-major
};

// The elements of a view of rank 1 to 4, f32 or bf16: its last dimension are the columns, all others together the rows.
Matrix matrix_of(const Tensor& tensor);

}  // namespace farspan::ref
