// SPDX-License-Identifier: Apache-2.0
// What every op asks of its operands, and the step from a run-time dtype to a compile-time type.
// All checks throw InternalError: "rms_norm_forward: weight is (12), expected (16)".
#pragma once

#include <string_view>

#include "base/error.h"
#include "tensor/tensor.h"

namespace farspan {

inline bool is_compute_dtype(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16; }

inline void check_compute_dtype(std::string_view op, std::string_view operand, const Tensor& tensor) {
  FARSPAN_CHECK(is_compute_dtype(tensor.dtype()), "{}: {} holds {}, expected f32 or bf16", op, operand,
                name_of(tensor.dtype()));
}

inline void check_dtype(std::string_view op, std::string_view operand, const Tensor& tensor, DType expected) {
  FARSPAN_CHECK(tensor.dtype() == expected, "{}: {} holds {}, expected {}", op, operand, name_of(tensor.dtype()),
                name_of(expected));
}

inline void check_shape(std::string_view op, std::string_view operand, const Tensor& tensor, const Shape& expected) {
  FARSPAN_CHECK(tensor.shape() == expected, "{}: {} is {}, expected {}", op, operand, tensor.shape().str(),
                expected.str());
}

inline void check_rank(std::string_view op, std::string_view operand, const Tensor& tensor, int lowest, int highest) {
  FARSPAN_CHECK(tensor.rank() >= lowest && tensor.rank() <= highest, "{}: {} is {}, expected rank {} to {}", op,
                operand, tensor.shape().str(), lowest, highest);
}

// The last dimension lies densely in memory.
inline void check_dense_rows(std::string_view op, std::string_view operand, const Tensor& tensor) {
  FARSPAN_CHECK(tensor.dim(-1) <= 1 || tensor.stride(-1) == 1, "{}: {} {} has last stride {}, expected 1", op, operand,
                tensor.shape().str(), tensor.stride(-1));
}

inline void check_contiguous(std::string_view op, std::string_view operand, const Tensor& tensor) {
  FARSPAN_CHECK(tensor.numel() == 0 || tensor.contiguous(), "{}: {} {} is strided, expected contiguous", op, operand,
                tensor.shape().str());
}

// Calls body(float{}) or body(BFloat16{}).
template <typename Body>
void with_compute_type(DType dtype, Body&& body) {
  if (dtype == DType::bf16)
    body(BFloat16{});
  else
    body(float{});
}

}  // namespace farspan
