// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "device/cuda/cuda.h"

namespace farspan::cuda {

// Queues `kernel` on `stream` with `blocks` blocks in one row.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes, cudaStream_t stream,
            const Arguments&... arguments) {
  if (blocks == 0) return;
  const void* const function = reinterpret_cast<const void*>(kernel);
  if (shared_bytes > 48 * 1024)  // more must be asked for
    FARSPAN_CUDA(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  FARSPAN_CUDA(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

}  // namespace farspan::cuda
