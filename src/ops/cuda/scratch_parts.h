// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/device.h"
#include "ops/cuda/scratch.h"
#include "tensor/tensor.h"

namespace farspan::cuda {

// Parts of the device's scratch, one behind the other (scratch.h: scratch_part).
class ScratchParts {
 public:
  explicit ScratchParts(const Device& device)
      : next_(static_cast<char*>(device.scratch())), left_(device.scratch_bytes()) {}

  void* take(int64_t bytes) {
    void* const part = next_;
    next_ += scratch_part(bytes);
    left_ -= scratch_part(bytes);
    return part;
  }
  Tensor take(DType dtype, const Shape& shape) { return {take(shape.numel() * size_of(dtype)), dtype, shape}; }
  template <typename T>
  T* take_array(int64_t count) {
    return static_cast<T*>(take(count * static_cast<int64_t>(sizeof(T))));
  }
  void* rest() const { return next_; }
  int64_t left() const { return left_; }

 private:
  char* next_;
  int64_t left_;
};

}  // namespace farspan::cuda
