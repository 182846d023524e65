// SPDX-License-Identifier: Apache-2.0
// The functions of cuBLASLt that ops/cuda/cublaslt.cpp calls, found in the library when the first of them is called.
// Linked as usual, the library takes 210 MB of memory and 0.35 s at the start of every program, also of one that
// computes on the CPU.
#include <cublasLt.h>
#include <dlfcn.h>
#include <string>

#include "base/error.h"

namespace farspan::cuda {
namespace {

void* library() {
  static void* const handle = [] {
    const std::string name = fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR);
    void* const opened = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (opened == nullptr) throw ConfigError(fmt::format("device cuda: cuBLASLt cannot be loaded: {}", dlerror()));
    return opened;
  }();
  return handle;
}

// Function: the declaration in cublasLt.h.
template <typename Function>
Function* find(const char* name) {
  void* const address = dlsym(library(), name);
  FARSPAN_CHECK(address != nullptr, "{} is not in libcublasLt.so.{}", name, CUBLAS_VER_MAJOR);
  return reinterpret_cast<Function*>(address);
}

}  // namespace
}  // namespace farspan::cuda

// Found once, then called with the arguments given.
#define FARSPAN_FORWARD(name, ...)                                                   \
  static const auto farspan_function = ::farspan::cuda::find<decltype(name)>(#name); \
  return farspan_function(__VA_ARGS__)

extern "C" {

cublasStatus_t CUBLASWINAPI cublasLtCreate(cublasLtHandle_t* handle) { FARSPAN_FORWARD(cublasLtCreate, handle); }

cublasStatus_t CUBLASWINAPI cublasLtDestroy(cublasLtHandle_t handle) { FARSPAN_FORWARD(cublasLtDestroy, handle); }

const char* CUBLASWINAPI cublasLtGetStatusName(cublasStatus_t status) {
  FARSPAN_FORWARD(cublasLtGetStatusName, status);
}

const char* CUBLASWINAPI cublasLtGetStatusString(cublasStatus_t status) {
  FARSPAN_FORWARD(cublasLtGetStatusString, status);
}

cublasStatus_t CUBLASWINAPI cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t description, const void* alpha,
                                           const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                                           cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                                           cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                                           const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                                           size_t workspace_bytes, cudaStream_t stream) {
  FARSPAN_FORWARD(cublasLtMatmul, handle, description, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout,
                  algorithm, workspace, workspace_bytes, stream);
}

cublasStatus_t CUBLASWINAPI cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algorithm,
                                                                 cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                                 void* buffer, size_t bytes, size_t* written) {
  FARSPAN_FORWARD(cublasLtMatmulAlgoConfigGetAttribute, algorithm, attribute, buffer, bytes, written);
}

cublasStatus_t CUBLASWINAPI cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t description,
                                                           cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                           cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                           cublasLtMatmulPreference_t preference, int asked,
                                                           cublasLtMatmulHeuristicResult_t results[], int* found) {
  FARSPAN_FORWARD(cublasLtMatmulAlgoGetHeuristic, handle, description, a, b, c, d, preference, asked, results, found);
}

cublasStatus_t CUBLASWINAPI cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t description, size_t bytes,
                                                            cublasComputeType_t compute, cudaDataType_t scale) {
  FARSPAN_FORWARD(cublasLtMatmulDescInit_internal, description, bytes, compute, scale);
}

cublasStatus_t CUBLASWINAPI cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                                           cublasLtMatmulDescAttributes_t attribute, const void* value,
                                                           size_t bytes) {
  FARSPAN_FORWARD(cublasLtMatmulDescSetAttribute, description, attribute, value, bytes);
}

cublasStatus_t CUBLASWINAPI cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference, size_t bytes) {
  FARSPAN_FORWARD(cublasLtMatmulPreferenceInit_internal, preference, bytes);
}

cublasStatus_t CUBLASWINAPI cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                                 cublasLtMatmulPreferenceAttributes_t attribute,
                                                                 const void* value, size_t bytes) {
  FARSPAN_FORWARD(cublasLtMatmulPreferenceSetAttribute, preference, attribute, value, bytes);
}

cublasStatus_t CUBLASWINAPI cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t bytes,
                                                              cudaDataType type, uint64_t rows, uint64_t columns,
                                                              int64_t leading) {
  FARSPAN_FORWARD(cublasLtMatrixLayoutInit_internal, layout, bytes, type, rows, columns, leading);
}

}  // extern "C"
