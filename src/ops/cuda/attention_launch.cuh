// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "device/cuda/cuda.h"
#include "ops/cuda/early_launch.cuh"

namespace farspan::cuda {

// Queues `kernel` on `stream` with `blocks` blocks in one row.
template <typename... Parameters, typename... Arguments>
void launch(Start start, void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes,
            cudaStream_t stream, const Arguments&... arguments) {
  if (blocks == 0) return;
  const void* const function = reinterpret_cast<const void*>(kernel);
  if (shared_bytes > 48 * 1024)  // more must be asked for
    FARSPAN_CUDA(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  launch_kernel(start, kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                static_cast<size_t>(shared_bytes), stream, arguments...);
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes, cudaStream_t stream,
            const Arguments&... arguments) {
  launch(Start::when_previous_ended, kernel, blocks, threads, shared_bytes, stream, arguments...);
}

}  // namespace farspan::cuda
