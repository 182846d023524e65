// SPDX-License-Identifier: Apache-2.0
#include "ops/embedding.h"

#include <cstring>

#include "ops/cpu/kernels.h"
#include "ops/operand_checks.h"

namespace farspan {
namespace {

// Columns of one thread's share of the backward at least: a few cache lines, so that threads seldom share one.
constexpr int64_t kColumns = 64;

void check_operands(std::string_view op, const Tensor& tokens, std::string_view rows_name, const Tensor& rows,
                    std::string_view table_name, const Tensor& table) {
  check_dtype(op, "tokens", tokens, DType::i32);
  check_rank(op, "tokens", tokens, 1, 1);
  check_contiguous(op, "tokens", tokens);
  check_rank(op, table_name, table, 2, 2);
  check_dense_rows(op, table_name, table);
  check_compute_dtype(op, rows_name, rows);
  check_shape(op, rows_name, rows, Shape({tokens.dim(0), table.dim(1)}));
  check_dense_rows(op, rows_name, rows);
}

// Before anything is written, so that a bad token leaves the outputs as they were.
void check_tokens(std::string_view op, const Tensor& tokens, int64_t vocabulary) {
  const int32_t* ids = tokens.data<int32_t>();
  for (int64_t i = 0; i < tokens.dim(0); ++i)
    if (ids[i] < 0 || ids[i] >= vocabulary)
      throw DataError(
          fmt::format("{}: token {} has id {}; the vocabulary holds ids 0 to {}", op, i, ids[i], vocabulary - 1));
}

template <typename T>
void add_rows(const int32_t* ids, const cpu::RowView& d_y, int64_t begin, int64_t end, const cpu::RowView& d_weight) {
  for (int64_t t = 0; t < d_y.rows(); ++t) {
    const T* from = d_y.row<T>(t);
    float* to = d_weight.row<float>(ids[t]);
    for (int64_t i = begin; i < end; ++i) to[i] += to_float(from[i]);
  }
}

}  // namespace

void embedding_forward(Device& device, const Tensor& tokens, const Tensor& weight, Tensor y) {
  check_operands("embedding_forward", tokens, "y", y, "weight", weight);
  check_dtype("embedding_forward", "weight", weight, y.dtype());
  const double bytes = static_cast<double>(2 * y.bytes() + tokens.bytes());
  device.run({"embedding_forward", OpClass::memory, 0, bytes}, [&] {
    check_tokens("embedding_forward", tokens, weight.dim(0));
    const int32_t* ids = tokens.data<int32_t>();
    const cpu::RowView from(weight), to(y);
    const size_t row_bytes = static_cast<size_t>(y.dim(1) * size_of(y.dtype()));
    parallel_for(device, y.dim(0), cpu::row_grain(y.dim(1)), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) std::memcpy(to.raw(t, 0), from.raw(ids[t], 0), row_bytes);
    });
  });
}

void embedding_backward(Device& device, const Tensor& tokens, const Tensor& d_y, Tensor d_weight) {
  check_operands("embedding_backward", tokens, "d_y", d_y, "d_weight", d_weight);
  check_dtype("embedding_backward", "d_weight", d_weight, DType::f32);
  const double elements = static_cast<double>(d_y.numel());
  const double bytes = static_cast<double>(d_y.bytes() + tokens.bytes()) + 8.0 * elements;
  device.run({"embedding_backward", OpClass::memory, elements, bytes}, [&] {
    check_tokens("embedding_backward", tokens, d_weight.dim(0));
    const cpu::RowView rows(d_y), table(d_weight);
    // Threads share the columns: each visits all tokens in order, and no two write the same element.
    parallel_for(device, d_y.dim(1), kColumns, [&](int64_t begin, int64_t end) {
      with_compute_type(d_y.dtype(),
                        [&](auto t) { add_rows<decltype(t)>(tokens.data<int32_t>(), rows, begin, end, table); });
    });
  });
}

}  // namespace farspan
