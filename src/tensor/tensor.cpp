// SPDX-License-Identifier: Apache-2.0
#include "tensor/tensor.h"

#include "base/math.h"

namespace farspan {
namespace {

// Views of the dry device carry addresses that are never read; integer arithmetic keeps them well defined.
void* advance(void* data, int64_t bytes) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes));
}

Shape row_major_strides(const Shape& shape) {
  Shape strides = shape;
  int64_t step = 1;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    strides[i] = step;
    step = checked_mul(step, shape[i]);
  }
  return strides;
}

}  // namespace

Shape::Shape(std::initializer_list<int64_t> sizes) : Shape(std::span(sizes.begin(), sizes.size())) {}

Shape::Shape(std::span<const int64_t> sizes) : rank_(static_cast<int>(sizes.size())) {
  FARSPAN_CHECK(sizes.size() <= kMaxRank, "shape of rank {}; at most {}", sizes.size(), kMaxRank);
  int i = 0;
  for (int64_t size : sizes) {
    FARSPAN_CHECK(size >= 0, "shape with negative size {}", size);
    sizes_[static_cast<size_t>(i++)] = size;
  }
}

int64_t Shape::numel() const {
  int64_t n = 1;
  for (int i = 0; i < rank_; ++i) n = checked_mul(n, (*this)[i]);
  return n;
}

bool Shape::operator==(const Shape& other) const {
  if (rank_ != other.rank_) return false;
  for (int i = 0; i < rank_; ++i)
    if ((*this)[i] != other[i]) return false;
  return true;
}

std::string Shape::str() const {
  std::string text = "(";
  for (int i = 0; i < rank_; ++i) text += (i ? ", " : "") + std::to_string((*this)[i]);
  return text + ")";
}

Tensor::Tensor(void* data, DType dtype, Shape shape)
    : data_(data), dtype_(dtype), shape_(shape), strides_(row_major_strides(shape)) {}

Tensor::Tensor(void* data, DType dtype, Shape shape, Shape strides)
    : data_(data), dtype_(dtype), shape_(shape), strides_(strides) {
  FARSPAN_CHECK(shape.rank() == strides.rank(), "tensor: shape {} and strides {} differ in rank", shape.str(),
                strides.str());
}

bool Tensor::contiguous() const {
  int64_t step = 1;
  for (int i = rank() - 1; i >= 0; --i) {
    if (shape_[i] != 1 && strides_[i] != step) return false;
    step *= shape_[i];
  }
  return true;
}

Tensor Tensor::slice(int dim, int64_t begin, int64_t end) const {
  if (dim < 0) dim += rank();
  FARSPAN_CHECK(dim >= 0 && dim < rank() && begin >= 0 && begin <= end && end <= shape_[dim],
                "slice [{}, {}) of dimension {} of {}", begin, end, dim, shape_.str());
  Tensor view = *this;
  view.shape_[dim] = end - begin;
  view.data_ = advance(data_, begin * strides_[dim] * size_of(dtype_));
  return view;
}

Tensor Tensor::reshape(Shape shape) const {
  FARSPAN_CHECK(contiguous(), "reshape of {}: not contiguous", shape_.str());
  FARSPAN_CHECK(shape.numel() == numel(), "reshape {} to {}: {} and {} elements", shape_.str(), shape.str(), numel(),
                shape.numel());
  return Tensor(data_, dtype_, shape);
}

Tensor Tensor::split_dim(int dim, int64_t outer, int64_t inner) const {
  if (dim < 0) dim += rank();
  FARSPAN_CHECK(dim >= 0 && dim < rank() && rank() < Shape::kMaxRank && outer * inner == shape_[dim],
                "split dimension {} of {} into {} x {}", dim, shape_.str(), outer, inner);
  auto split = [&](const Shape& from, int64_t first, int64_t second) {
    std::array<int64_t, Shape::kMaxRank> sizes{};
    size_t n = 0;
    for (int i = 0; i < rank(); ++i) {
      sizes[n++] = i == dim ? first : from[i];
      if (i == dim) sizes[n++] = second;
    }
    return Shape(std::span<const int64_t>(sizes.data(), n));
  };
  return Tensor(data_, dtype_, split(shape_, outer, inner), split(strides_, inner * strides_[dim], strides_[dim]));
}

}  // namespace farspan
