// SPDX-License-Identifier: Apache-2.0
// A strided view of rank 1 to 4 seen as a list of dense rows. Outer dimensions that follow each other in memory are
// merged, so that the address of a row usually costs one multiplication. All offsets are 64-bit.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "device/parallel_for.h"
#include "tensor/tensor.h"

namespace farspan::cpu {

class RowView {
 public:
  RowView() = default;

  // The last dimension is the row.
  explicit RowView(const Tensor& tensor)
      : data_(static_cast<char*>(tensor.raw())), element_bytes_(size_of(tensor.dtype())) {
    columns_ = tensor.dim(-1);
    for (int i = 0; i < tensor.rank() - 1; ++i) append_outer(tensor.dim(i), tensor.stride(i));
  }

  // A contiguous tensor as one row.
  static RowView flat(const Tensor& tensor) {
    RowView view;
    view.data_ = static_cast<char*>(tensor.raw());
    view.element_bytes_ = size_of(tensor.dtype());
    view.columns_ = tensor.numel();
    return view;
  }

  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }

  template <typename T>
  T* row(int64_t index) const {
    return reinterpret_cast<T*>(raw(index, 0));
  }

  // Address of an element whose type the caller does not know.
  char* raw(int64_t row_index, int64_t column) const {
    int64_t offset = column;
    for (size_t i = outer_count_; i-- > 1;) {
      offset += row_index % sizes_[i] * strides_[i];
      row_index /= sizes_[i];
    }
    if (outer_count_ > 0) offset += row_index * strides_[0];
    return data_ + offset * element_bytes_;
  }

 private:
  void append_outer(int64_t size, int64_t stride) {
    rows_ *= size;
    if (size == 1) return;
    if (outer_count_ > 0 && strides_[outer_count_ - 1] == size * stride) {
      sizes_[outer_count_ - 1] *= size;
      strides_[outer_count_ - 1] = stride;
      return;
    }
    sizes_[outer_count_] = size;
    strides_[outer_count_++] = stride;
  }

  char* data_ = nullptr;
  int64_t element_bytes_ = 1;
  int64_t rows_ = 1;
  int64_t columns_ = 0;
  size_t outer_count_ = 0;
  std::array<int64_t, Shape::kMaxRank> sizes_{};
  std::array<int64_t, Shape::kMaxRank> strides_{};
};

// Elements below which waking a second thread costs more than it saves: about 5 us of work against 2 us of wake-up.
constexpr int64_t kElementsPerThread = 16384;

// Rows of `columns` elements that one thread should get at least.
inline int64_t row_grain(int64_t columns) {
  return std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, columns));
}

}  // namespace farspan::cpu
