// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <vector>

#include "base/math.h"
#include "device/parallel_for.h"
#include "ops/cpu/fp8.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/kernels.h"

namespace farspan::cpu {
namespace {

// Edge of a tile. A widened element costs 6 bytes of traffic and is used up to this many times, which makes the
// widening about a tenth of the product; three tiles of fp32 are 12 MiB.
constexpr int64_t kTile = 1024;

// Tiles of one dimension: as few as kTile allows, of nearly equal size.
class Tiles {
 public:
  explicit Tiles(int64_t size) : size_(size), count_(ceil_div(size, kTile)) {}
  int64_t count() const { return count_; }
  int64_t begin(int64_t i) const { return size_ * i / count_; }
  int64_t extent(int64_t i) const { return begin(i + 1) - begin(i); }
  int64_t largest() const { return ceil_div(size_, count_); }

 private:
  int64_t size_, count_;
};

// The tile's rows [row, row + rows) and columns [column, column + columns) as fp32, dense, in the operand's own order:
// a transposed operand stays transposed.
GemmOperand widen(const Device& device, const GemmOperand& from, int64_t row, int64_t rows, int64_t column,
                  int64_t columns, float* to) {
  const char* const first =
      static_cast<const char*>(from.data) + (row * from.row_stride + column * from.column_stride) * size_of(from.dtype);
  const bool by_rows = from.column_stride == 1;
  const int64_t lines = by_rows ? rows : columns, length = by_rows ? columns : rows;
  const int64_t line_stride = by_rows ? from.row_stride : from.column_stride;
  const bool fp8 = is_fp8(from.dtype);
  const std::array<float, 256> values = fp8 ? fp8_values(from.dtype, *from.scale) : std::array<float, 256>{};
  parallel_for(device, lines, row_grain(length), [&](int64_t begin, int64_t end) {
    for (int64_t line = begin; line < end; ++line) {
      const char* const source = first + line * line_stride * size_of(from.dtype);
      float* const target = to + line * length;
      if (!fp8) {
        cast_elements(source, DType::bf16, target, DType::f32, length);
        continue;
      }
      for (int64_t i = 0; i < length; ++i) target[i] = values[static_cast<uint8_t>(source[i])];
    }
  });
  return by_rows ? GemmOperand{to, length, 1} : GemmOperand{to, 1, length};
}

void copy_tile(const Device& device, int64_t rows, int64_t columns, const void* from, DType from_dtype,
               int64_t from_stride, void* to, DType to_dtype, int64_t to_stride) {
  parallel_for(device, rows, row_grain(columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      cast_elements(static_cast<const char*>(from) + row * from_stride * size_of(from_dtype), from_dtype,
                    static_cast<char*>(to) + row * to_stride * size_of(to_dtype), to_dtype, columns);
  });
}

// c's tile as the sum over all of k, in fp32: in place, or in scratch when c is bf16.
class WidenedProduct {
 public:
  WidenedProduct(Device& device, const GemmProblem& problem, std::vector<float>& scratch)
      : device_(device), problem_(problem), rows_(problem.m), columns_(problem.n), depth_(problem.k) {
    const int64_t a_size = rows_.largest() * depth_.largest();
    const int64_t b_size = depth_.largest() * columns_.largest();
    const int64_t c_size = problem.c_dtype == DType::bf16 ? rows_.largest() * columns_.largest() : 0;
    scratch.resize(std::max(scratch.size(), static_cast<size_t>(a_size + b_size + c_size)));
    a_ = scratch.data();
    b_ = a_ + a_size;
    c_ = b_ + b_size;
  }

  GemmOutcome run() {
    GemmOutcome outcome;
    for (int64_t j = 0; j < columns_.count(); ++j)
      for (int64_t i = 0; i < rows_.count(); ++i)
        if (outcome = tile(i, j); !outcome.ran) return outcome;
    return outcome;
  }

 private:
  GemmOutcome tile(int64_t i, int64_t j) {
    const int64_t rows = rows_.extent(i), columns = columns_.extent(j);
    char* c = static_cast<char*>(problem_.c) +
              (rows_.begin(i) * problem_.c_row_stride + columns_.begin(j)) * size_of(problem_.c_dtype);
    const bool narrow = problem_.c_dtype == DType::bf16;
    const bool accumulate = problem_.addend != nullptr;

    GemmProblem part;
    part.m = rows;
    part.n = columns;
    part.c = narrow ? static_cast<void*>(c_) : c;
    part.c_row_stride = narrow ? columns : problem_.c_row_stride;
    if (narrow && accumulate)
      copy_tile(device_, rows, columns, c, DType::bf16, problem_.c_row_stride, c_, DType::f32, columns);

    GemmOutcome outcome;
    for (int64_t l = 0; l < depth_.count(); ++l) {
      part.k = depth_.extent(l);
      part.a = widen(device_, problem_.a, rows_.begin(i), rows, depth_.begin(l), part.k, a_);
      if (i == 0 || depth_.count() > 1)
        b_tile_ = widen(device_, problem_.b, depth_.begin(l), part.k, columns_.begin(j), columns, b_);
      part.b = b_tile_;
      part.addend = accumulate || l > 0 ? part.c : nullptr;
      outcome = gemm_onednn(device_, part);
      if (!outcome.ran) return outcome;
    }
    if (narrow) copy_tile(device_, rows, columns, c_, DType::f32, columns, c, DType::bf16, problem_.c_row_stride);
    return outcome;
  }

  Device& device_;
  const GemmProblem& problem_;
  Tiles rows_, columns_, depth_;
  float *a_, *b_, *c_;
  GemmOperand b_tile_;  // kept from one row of tiles to the next when k is one tile
};

}  // namespace

GemmOutcome gemm_widened(Device& device, const GemmProblem& problem) {
  if (problem.a.dtype == DType::f32) return {false, "operands are fp32 already"};
  thread_local std::vector<float> scratch;
  return WidenedProduct(device, problem, scratch).run();
}

}  // namespace farspan::cpu
