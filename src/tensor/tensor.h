// SPDX-License-Identifier: Apache-2.0
// Tensor: a typed, strided view of memory that somebody else owns (the arena, or a test's vector). Copying one copies
// the view. House convention for ops: inputs are `const Tensor&`, outputs are `Tensor` by value, last.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "base/error.h"
#include "tensor/dtype.h"

namespace farspan {

// Up to kMaxRank sizes, all 64-bit.
class Shape {
 public:
  static constexpr int kMaxRank = 6;

  Shape() = default;
  Shape(std::initializer_list<int64_t> sizes);
  explicit Shape(std::span<const int64_t> sizes);

  int rank() const { return rank_; }
  int64_t operator[](int dim) const { return sizes_[static_cast<size_t>(dim < 0 ? dim + rank_ : dim)]; }
  int64_t& operator[](int dim) { return sizes_[static_cast<size_t>(dim < 0 ? dim + rank_ : dim)]; }
  int64_t numel() const;  // throws InternalError past 2^63
  bool operator==(const Shape& other) const;
  std::string str() const;  // "(2, 16, 64)"

 private:
  std::array<int64_t, kMaxRank> sizes_{};
  int rank_ = 0;
};

class Tensor {
 public:
  Tensor() = default;                                           // undefined: no data, rank 0
  Tensor(void* data, DType dtype, Shape shape);                 // contiguous, row-major
  Tensor(void* data, DType dtype, Shape shape, Shape strides);  // strides in elements

  bool defined() const { return data_ != nullptr; }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  int rank() const { return shape_.rank(); }
  int64_t dim(int i) const { return shape_[i]; }       // negative counts from the end
  int64_t stride(int i) const { return strides_[i]; }  // elements
  int64_t numel() const { return shape_.numel(); }
  int64_t bytes() const { return numel() * size_of(dtype_); }
  bool contiguous() const;

  void* raw() const { return data_; }

  // Typed pointer to the first element; throws InternalError when T is not this tensor's dtype.
  template <typename T>
  T* data() const {
    FARSPAN_CHECK(DTypeOf<T>::value == dtype_, "tensor {} holds {}, asked for {}", shape_.str(), name_of(dtype_),
                  name_of(DTypeOf<T>::value));
    return static_cast<T*>(data_);
  }

  // Elements [begin, end) of one dimension.
  Tensor slice(int dim, int64_t begin, int64_t end) const;
  // The same elements under another shape; needs contiguous().
  Tensor reshape(Shape shape) const;
  // Splits dimension `dim` of size a*b into (a, b); works on strided views.
  Tensor split_dim(int dim, int64_t outer, int64_t inner) const;

 private:
  void* data_ = nullptr;
  DType dtype_ = DType::f32;
  Shape shape_;
  Shape strides_;
};

}  // namespace farspan
