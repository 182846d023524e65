// SPDX-License-Identifier: Apache-2.0
#include "ops/cuda/tensor_map.h"

#include "device/cuda/cuda.h"

namespace farspan::cuda {
namespace {

// The driver's function, found at run time so that nothing has to be linked with the driver.
decltype(&cuTensorMapEncodeTiled) encode_function() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  FARSPAN_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
  FARSPAN_CHECK(found == cudaDriverEntryPointSuccess && function != nullptr,
                "CUDA: the driver has no cuTensorMapEncodeTiled; version 12 or later is needed");
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

}  // namespace

TensorMap heads_map(const HeadsView& view, int tokens, int heads, int head_size, int rows) {
  static const auto encode = encode_function();
  // A dimension of one has no stride to speak of, but it is checked.
  const auto bytes = [](int count, int64_t stride) { return static_cast<cuuint64_t>(count > 1 ? stride * 2 : 16); };
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(head_size), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(tokens)};
  const cuuint64_t strides[2] = {bytes(heads, view.head_stride), bytes(tokens, view.token_stride)};
  const cuuint32_t box[3] = {64, 1, static_cast<cuuint32_t>(rows)};
  const cuuint32_t steps[3] = {1, 1, 1};
  TensorMap map;
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, view.data, sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  FARSPAN_CHECK(result == CUDA_SUCCESS,
                "CUDA: cuTensorMapEncodeTiled failed with {} for ({}, {}, {}), strides {} and {}",
                static_cast<int>(result), tokens, heads, head_size, view.token_stride, view.head_stride);
  return map;
}

}  // namespace farspan::cuda
