// SPDX-License-Identifier: Apache-2.0
// cuBLASLt as the GEMM uses it. The library's matrices lie by columns:
//
//   D (rows, columns) = alpha op(A) op(B) + beta C
//
// A row-major product is asked for as its transpose, c^T = b^T a^T, which needs no other change.
#pragma once

#include <array>
#include <cublasLt.h>
#include <string>
#include <vector>

#include "device/cuda/cuda.h"

namespace farspan::cuda {

[[noreturn]] void throw_cublas_failure(cublasStatus_t status, const char* statement, const char* file, int line);

// FARSPAN_CUBLAS(cublasLtCreate(&h)): throws InternalError with the statement, its place and the library's own words.
#define FARSPAN_CUBLAS(statement)                                                            \
  do {                                                                                       \
    const cublasStatus_t farspan_status = (statement);                                       \
    if (farspan_status != CUBLAS_STATUS_SUCCESS) [[unlikely]]                                \
      ::farspan::cuda::throw_cublas_failure(farspan_status, #statement, __FILE__, __LINE__); \
  } while (false)

struct MatmulMatrix {
  cudaDataType_t type = CUDA_R_32F;
  int64_t rows = 0, columns = 0;  // as it lies, before it is transposed
  int64_t stride = 0;             // elements from one column to the next
};

// What the library needs to know of a product but the addresses. Sums are fp32; C has D's type.
class Matmul {
 public:
  Matmul(const MatmulMatrix& a, cublasOperation_t transpose_a, const MatmulMatrix& b, cublasOperation_t transpose_b,
         const MatmulMatrix& c, const MatmulMatrix& d);

  template <typename Value>
  void set(cublasLtMatmulDescAttributes_t attribute, const Value& value) {
    FARSPAN_CUBLAS(cublasLtMatmulDescSetAttribute(&operation_, attribute, &value, sizeof(value)));
  }

  // The library takes descriptions of its own making by address and does not change them.
  cublasLtMatmulDesc_t operation() const { return const_cast<cublasLtMatmulDesc_t>(&operation_); }
  cublasLtMatrixLayout_t a() const { return const_cast<cublasLtMatrixLayout_t>(&a_); }
  cublasLtMatrixLayout_t b() const { return const_cast<cublasLtMatrixLayout_t>(&b_); }
  cublasLtMatrixLayout_t c() const { return const_cast<cublasLtMatrixLayout_t>(&c_); }
  cublasLtMatrixLayout_t d() const { return const_cast<cublasLtMatrixLayout_t>(&d_); }

 private:
  cublasLtMatmulDescOpaque_t operation_;
  cublasLtMatrixLayoutOpaque_t a_, b_, c_, d_;
};

// The addresses and factors of one run. c is not read where beta is 0.
struct MatmulRun {
  const void *a = nullptr, *b = nullptr, *c = nullptr;
  void* d = nullptr;
  float alpha = 1, beta = 0;
};

// Of each of a, b, c, d: the largest power of two, up to 256, that divides its address.
std::array<uint32_t, 4> alignments(const MatmulRun& run);

using MatmulAlgorithm = cublasLtMatmulHeuristicResult_t;

// The library's handle of one device; its runs use the device's scratch (kGemmScratchBytes) as workspace.
class CublasLt {
 public:
  explicit CublasLt(Device& device);
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  // At most `most`, best first by the library's estimate; empty where it has none. Only those whose sums have a fixed
  // order and are rounded to D's type once.
  std::vector<MatmulAlgorithm> algorithms(const Matmul& matmul, const std::array<uint32_t, 4>& aligned, int most) const;

  // Queues the product on the compute stream.
  cublasStatus_t run(const Matmul& matmul, const MatmulAlgorithm& algorithm, const MatmulRun& run) const;

  // The fastest of the algorithms by measurement, the first where none is clearly faster, and -1 where none runs. Waits
  // for the device. What it leaves in d is overwritten by the run that follows; where that adds to d (c is d), d
  // changes by less than 1e-30.
  int fastest(const Matmul& matmul, const std::vector<MatmulAlgorithm>& algorithms, const MatmulRun& run) const;

 private:
  Device& device_;
  cublasLtHandle_t handle_ = nullptr;
};

// "algorithm 66, tile 23, cluster 3, stages 36, split-K 1": the library's numbers (cublasLt.h).
std::string description_of(const MatmulAlgorithm& algorithm);

}  // namespace farspan::cuda
