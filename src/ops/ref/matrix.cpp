// SPDX-License-Identifier: Apache-2.0
#include "ops/ref/matrix.h"

#include "ops/operand_checks.h"

namespace farspan::ref {

Matrix matrix_of(const Tensor& tensor) {
  check_compute_dtype("matrix_of", "tensor", tensor);
  check_rank("matrix_of", "tensor", tensor, 1, 4);
  if (tensor.numel() == 0) return {};
  Matrix matrix(tensor.numel() / tensor.dim(-1), tensor.dim(-1));
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    int64_t rest = i, offset = 0;
    for (int d = tensor.rank() - 1; d >= 0; --d) {
      offset += rest % tensor.dim(d) * tensor.stride(d);
      rest /= tensor.dim(d);
    }
    matrix.values[static_cast<size_t>(i)] = tensor.dtype() == DType::f32
                                                ? static_cast<double>(tensor.data<float>()[offset])
                                                : static_cast<double>(to_float(tensor.data<BFloat16>()[offset]));
  }
  return matrix;
}

}  // namespace farspan::ref
