// SPDX-License-Identifier: Apache-2.0
#include "ops/bias.h"

#include <algorithm>
#include <array>

#include "ops/cpu/kernels.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/scratch.h"
#include "ops/operand_checks.h"

namespace farspan {
namespace {

void check_operands(std::string_view op, std::string_view matrix_name, const Tensor& matrix,
                    std::string_view vector_name, const Tensor& vector) {
  check_compute_dtype(op, matrix_name, matrix);
  check_rank(op, matrix_name, matrix, 2, 2);
  check_dense_rows(op, matrix_name, matrix);
  check_shape(op, vector_name, vector, Shape({matrix.dim(1)}));
  check_contiguous(op, vector_name, vector);
}

// Columns whose fp64 sums are held at once: two cache lines of bf16 per row, and the sums stay in registers or L1.
constexpr int64_t kColumns = 64;

template <typename T>
void add_column_sums(const cpu::RowView& d_y, int64_t begin, int64_t end, float* d_bias) {
  for (int64_t first = begin; first < end; first += kColumns) {
    const int64_t count = std::min(kColumns, end - first);
    std::array<double, kColumns> sums{};
    for (int64_t row = 0; row < d_y.rows(); ++row) {
      const T* values = d_y.row<T>(row) + first;
      for (int64_t i = 0; i < count; ++i) sums[static_cast<size_t>(i)] += static_cast<double>(to_float(values[i]));
    }
    for (int64_t i = 0; i < count; ++i) d_bias[first + i] += static_cast<float>(sums[static_cast<size_t>(i)]);
  }
}

}  // namespace

void bias_add(Device& device, const Tensor& bias, Tensor y) {
  check_operands("bias_add", "y", y, "bias", bias);
  check_compute_dtype("bias_add", "bias", bias);
  const double elements = static_cast<double>(y.numel());
  const double bytes = static_cast<double>(2 * y.bytes() + bias.bytes());
  device.run({"bias_add", OpClass::memory, elements, bytes}, [&] {
    if (device.on_cuda()) return cuda::bias_add(device, bias, y);
    const cpu::RowView rows(y);
    parallel_for(device, rows.rows(), cpu::row_grain(rows.columns()), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        void* values = rows.raw(row, 0);
        cpu::add_elements(values, y.dtype(), bias.raw(), bias.dtype(), values, y.dtype(), rows.columns());
      }
    });
  });
}

void bias_backward(Device& device, const Tensor& d_y, Tensor d_bias) {
  check_operands("bias_backward", "d_y", d_y, "d_bias", d_bias);
  check_dtype("bias_backward", "d_bias", d_bias, DType::f32);
  const double elements = static_cast<double>(d_y.numel());
  const double bytes = static_cast<double>(d_y.bytes() + 2 * d_bias.bytes());
  const int64_t scratch = device.targets_cuda() ? cuda::bias_backward_scratch(d_y.dim(0), d_y.dim(1)) : 0;
  device.run({"bias_backward", OpClass::memory, elements, bytes, scratch}, [&] {
    if (device.on_cuda()) return cuda::bias_backward(device, d_y, d_bias);
    const cpu::RowView rows(d_y);
    parallel_for(device, rows.columns(), kColumns, [&](int64_t begin, int64_t end) {
      with_compute_type(d_y.dtype(),
                        [&](auto t) { add_column_sums<decltype(t)>(rows, begin, end, d_bias.data<float>()); });
    });
  });
}

}  // namespace farspan
