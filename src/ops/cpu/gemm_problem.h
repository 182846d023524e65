// SPDX-License-Identifier: Apache-2.0
// A matrix product with the transposes already turned into strides, and the implementations that may compute it on a
// CPU.
#pragma once

#include <cstdint>
#include <string>

#include "device/device.h"
#include "ops/accumulate.h"
#include "tensor/dtype.h"

namespace farspan::cpu {

// One of the two strides is 1.
struct GemmOperand {
  const void* data = nullptr;
  int64_t row_stride = 0;     // elements
  int64_t column_stride = 0;  // elements
};

// c (m, n) = a (m, k) b (k, n), plus c when accumulating; m, n, k at least 1; rows of c are dense.
struct GemmProblem {
  int64_t m = 0, n = 0, k = 0;
  GemmOperand a, b;
  DType operand_dtype = DType::f32;  // of a and b
  void* c = nullptr;
  int64_t c_row_stride = 0;
  DType c_dtype = DType::f32;
  Accumulate accumulate = Accumulate::no;
};

// Whether an implementation computed the product, and which of its variants did or why it declined.
struct GemmOutcome {
  bool ran = false;
  std::string detail;
};

// oneDNN's matmul. Declines types for which the library has nothing better than its own plain loops on this machine.
// Scratch is the library's, in its own mode: its jit GEMM reports 0 bytes, but packs panels of a and b into buffers
// that it allocates in each call and frees again (1.1 to 1.7 MiB measured with 2.6 for 1024^3 and 1536^3 on one and two
// threads).
GemmOutcome gemm_onednn(Device& device, const GemmProblem& problem);

// bf16 on machines without bf16 instructions: tiles of a and b are widened to fp32 and multiplied by gemm_onednn, which
// loses nothing, as products and sums are fp32 anyway. Scratch: at most 12 MiB per calling thread, kept.
GemmOutcome gemm_widened(Device& device, const GemmProblem& problem);

}  // namespace farspan::cpu
