// SPDX-License-Identifier: Apache-2.0
#include "ops/embedding.h"

#include <cstring>

#include "ops/cpu/kernels.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/scratch.h"
#include "ops/operand_checks.h"

namespace farspan {
namespace {

// Columns of one thread's share of the backward at least: a few cache lines, so that threads seldom share one.
constexpr int64_t kColumns = 64;

void check_operands(std::string_view op, const Tensor& tokens, std::string_view rows_name, const Tensor& rows,
                    std::string_view table_name, const Tensor& table, const VocabularyPart& part) {
  check_dtype(op, "tokens", tokens, DType::i32);
  check_rank(op, "tokens", tokens, 1, 1);
  check_contiguous(op, "tokens", tokens);
  check_rank(op, table_name, table, 2, 2);
  check_dense_rows(op, table_name, table);
  check_compute_dtype(op, rows_name, rows);
  check_shape(op, rows_name, rows, Shape({tokens.dim(0), table.dim(1)}));
  check_dense_rows(op, rows_name, rows);
  FARSPAN_CHECK(part.first_id >= 0 && part.first_id + table.dim(0) <= part.vocabulary,
                "{}: {} holds ids {} up to {}, not in a vocabulary of {}", op, table_name, part.first_id,
                part.first_id + table.dim(0), part.vocabulary);
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
void add_rows(const int32_t* ids, int64_t first_id, const cpu::RowView& d_y, int64_t begin, int64_t end,
              const cpu::RowView& d_weight) {
  for (int64_t t = 0; t < d_y.rows(); ++t) {
    const int64_t row = ids[t] - first_id;
    if (row < 0 || row >= d_weight.rows()) continue;
    const T* from = d_y.row<T>(t);
    float* to = d_weight.row<float>(row);
    for (int64_t i = begin; i < end; ++i) to[i] += to_float(from[i]);
  }
}

}  // namespace

void embedding_forward(Device& device, const Tensor& tokens, const Tensor& weight, Tensor y) {
  embedding_forward(device, tokens, weight, {.first_id = 0, .vocabulary = weight.dim(0)}, y);
}

void embedding_forward(Device& device, const Tensor& tokens, const Tensor& weight, const VocabularyPart& part,
                       Tensor y) {
  constexpr std::string_view op = "embedding_forward";
  check_operands(op, tokens, "y", y, "weight", weight, part);
  check_compute_dtype(op, "weight", weight);
  if (y.dtype() != DType::f32) check_dtype(op, "weight", weight, y.dtype());
  const double read = static_cast<double>(y.numel() * size_of(weight.dtype()) + tokens.bytes());
  device.run({op, OpClass::memory, 0, read + static_cast<double>(y.bytes())}, [&] {
    if (device.on_cuda()) return cuda::embedding_forward(device, tokens, weight, part, y);
    check_tokens(op, tokens, part.vocabulary);
    const int32_t* ids = tokens.data<int32_t>();
    const cpu::RowView from(weight), to(y);
    const size_t row_bytes = static_cast<size_t>(y.dim(1) * size_of(y.dtype()));
    parallel_for(device, y.dim(0), cpu::row_grain(y.dim(1)), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t row = ids[t] - part.first_id;
        if (row >= 0 && row < weight.dim(0))
          cpu::cast_elements(from.raw(row, 0), weight.dtype(), to.raw(t, 0), y.dtype(), y.dim(1));
        else
          std::memset(to.raw(t, 0), 0, row_bytes);
      }
    });
  });
}

void embedding_backward(Device& device, const Tensor& tokens, const Tensor& d_y, Tensor d_weight) {
  embedding_backward(device, tokens, d_y, {.first_id = 0, .vocabulary = d_weight.dim(0)}, d_weight);
}

void embedding_backward(Device& device, const Tensor& tokens, const Tensor& d_y, const VocabularyPart& part,
                        Tensor d_weight) {
  constexpr std::string_view op = "embedding_backward";
  check_operands(op, tokens, "d_y", d_y, "d_weight", d_weight, part);
  check_dtype(op, "d_weight", d_weight, DType::f32);
  const double elements = static_cast<double>(d_y.numel());
  const double bytes = static_cast<double>(d_y.bytes() + tokens.bytes()) + 8.0 * elements;
  const int64_t scratch =
      device.targets_cuda() ? cuda::embedding_backward_scratch(d_y.dim(0), d_weight.dim(0), d_y.dim(1)) : 0;
  device.run({op, OpClass::memory, elements, bytes, scratch}, [&] {
    if (device.on_cuda()) return cuda::embedding_backward(device, tokens, d_y, part, d_weight);
    check_tokens(op, tokens, part.vocabulary);
    const cpu::RowView rows(d_y), table(d_weight);
    // Threads share the columns: each visits all tokens in order, and no two write the same element.
    parallel_for(device, d_y.dim(1), kColumns, [&](int64_t begin, int64_t end) {
      with_compute_type(d_y.dtype(), [&](auto t) {
        add_rows<decltype(t)>(tokens.data<int32_t>(), part.first_id, rows, begin, end, table);
      });
    });
  });
}

}  // namespace farspan
