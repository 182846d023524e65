// SPDX-License-Identifier: Apache-2.0
#include "tensor/dtype.h"

#include "base/error.h"

namespace farspan {

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 4;
    case DType::bf16:
      return 2;
    case DType::f64:
      return 8;
    case DType::i32:
      return 4;
    case DType::i64:
      return 8;
    case DType::u8:
    case DType::f8e4m3:
    case DType::f8e5m2:
      return 1;
  }
  throw InternalError("size_of: unknown dtype");
}

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f64:
      return "f64";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
    case DType::u8:
      return "u8";
    case DType::f8e4m3:
      return "f8e4m3";
    case DType::f8e5m2:
      return "f8e5m2";
  }
  throw InternalError("name_of: unknown dtype");
}

}  // namespace farspan
