// SPDX-License-Identifier: Apache-2.0
#include "ops/elementwise.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/math.h"
#include "ops/cpu/kernels.h"
#include "ops/cuda/ops.h"
#include "ops/operand_checks.h"

namespace farspan {
namespace {

using cpu::RowView;

void check_view(std::string_view op, std::string_view operand, const Tensor& tensor) {
  check_rank(op, operand, tensor, 1, 4);
  check_dense_rows(op, operand, tensor);
}

// Calls body(row, column, count) on pieces that together cover the rows, in parallel.
template <typename Body>
void for_pieces(const Device& device, const RowView& view, const Body& body) {
  if (view.rows() == 0 || view.columns() == 0) return;
  const int64_t per_row = ceil_div(view.columns(), cpu::kElementsPerThread);
  const int64_t size = ceil_div(view.columns(), per_row);
  parallel_for(device, view.rows() * per_row, cpu::row_grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t column = piece % per_row * size;
      const int64_t count = std::min(size, view.columns() - column);
      if (count > 0) body(piece / per_row, column, count);
    }
  });
}

template <typename T>
void fill_elements(char* to, T value, int64_t count) {
  std::fill_n(reinterpret_cast<T*>(to), count, value);
}

template <typename T>
bool holds(double value) {
  return value >= static_cast<double>(std::numeric_limits<T>::min()) &&
         value < -static_cast<double>(std::numeric_limits<T>::min()) && value == std::floor(value);
}

void check_summand(std::string_view name, const Tensor& tensor, const Tensor& y) {
  check_compute_dtype("add", name, tensor);
  check_view("add", name, tensor);
  check_shape("add", name, tensor, y.shape());
}

void check_fill(const Tensor& x, double value) {
  check_view("fill", "x", x);
  FARSPAN_CHECK(is_compute_dtype(x.dtype()) || x.dtype() == DType::i32 || x.dtype() == DType::i64,
                "fill: x holds {}, expected f32, bf16, i32 or i64", name_of(x.dtype()));
  FARSPAN_CHECK(x.dtype() != DType::i32 || holds<int32_t>(value), "fill: {} does not fit i32", value);
  FARSPAN_CHECK(x.dtype() != DType::i64 || holds<int64_t>(value), "fill: {} does not fit i64", value);
}

}  // namespace

void add(Device& device, const Tensor& a, const Tensor& b, Tensor y) {
  check_summand("a", a, y);
  check_summand("b", b, y);
  check_summand("y", y, y);
  const double bytes = static_cast<double>(a.bytes() + b.bytes() + y.bytes());
  device.run({"add", OpClass::memory, static_cast<double>(y.numel()), bytes}, [&] {
    if (device.on_cuda()) return cuda::add(device, a, b, y);
    const bool flat = a.contiguous() && b.contiguous() && y.contiguous();
    const auto view = [flat](const Tensor& tensor) { return flat ? RowView::flat(tensor) : RowView(tensor); };
    const RowView from_a = view(a), from_b = view(b), to = view(y);
    for_pieces(device, to, [&](int64_t row, int64_t column, int64_t count) {
      cpu::add_elements(from_a.raw(row, column), a.dtype(), from_b.raw(row, column), b.dtype(), to.raw(row, column),
                        y.dtype(), count);
    });
  });
}

void cast(Device& device, const Tensor& x, Tensor y) {
  check_view("cast", "x", x);
  check_view("cast", "y", y);
  check_shape("cast", "y", y, x.shape());
  FARSPAN_CHECK(x.dtype() == y.dtype() || (is_compute_dtype(x.dtype()) && is_compute_dtype(y.dtype())),
                "cast: {} to {}; possible are f32 to bf16, bf16 to f32 and copies", name_of(x.dtype()),
                name_of(y.dtype()));
  device.run({"cast", OpClass::memory, 0, static_cast<double>(x.bytes() + y.bytes())}, [&] {
    if (device.on_cuda()) return cuda::cast(device, x, y);
    const bool flat = x.contiguous() && y.contiguous();
    const RowView from = flat ? RowView::flat(x) : RowView(x), to = flat ? RowView::flat(y) : RowView(y);
    for_pieces(device, to, [&](int64_t row, int64_t column, int64_t count) {
      cpu::cast_elements(from.raw(row, column), x.dtype(), to.raw(row, column), y.dtype(), count);
    });
  });
}

void fill(Device& device, Tensor x, double value) {
  check_fill(x, value);
  device.run({"fill", OpClass::memory, 0, static_cast<double>(x.bytes())}, [&] {
    if (device.on_cuda()) return cuda::fill(device, x, value);
    const RowView view = x.contiguous() ? RowView::flat(x) : RowView(x);
    for_pieces(device, view, [&](int64_t row, int64_t column, int64_t count) {
      char* to = view.raw(row, column);
      switch (x.dtype()) {
        case DType::bf16:
          return fill_elements(to, to_bfloat16(static_cast<float>(value)), count);
        case DType::i32:
          return fill_elements(to, static_cast<int32_t>(value), count);
        case DType::i64:
          return fill_elements(to, static_cast<int64_t>(value), count);
        default:
          return fill_elements(to, static_cast<float>(value), count);
      }
    });
  });
}

void scale(Device& device, Tensor x, double factor) {
  check_view("scale", "x", x);
  check_dtype("scale", "x", x, DType::f32);
  device.run({"scale", OpClass::memory, static_cast<double>(x.numel()), static_cast<double>(2 * x.bytes())}, [&] {
    if (device.on_cuda()) return cuda::scale(device, x, factor);
    const RowView view = x.contiguous() ? RowView::flat(x) : RowView(x);
    const float multiplier = static_cast<float>(factor);
    for_pieces(device, view, [&](int64_t row, int64_t column, int64_t count) {
      float* values = reinterpret_cast<float*>(view.raw(row, column));
      for (int64_t i = 0; i < count; ++i) values[i] *= multiplier;
    });
  });
}

}  // namespace farspan
