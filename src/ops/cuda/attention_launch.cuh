// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "device/cuda/cuda.h"

namespace farspan::cuda {

// How a kernel follows the one that was queued before it.
enum class Start {
  behind_previous,
  // As soon as all blocks of the one before have started and called let_next_start(): it must not read what that one
  // writes, and one of its blocks must call await_previous(), so that whoever comes behind it comes behind both.
  beside_previous
};

// Queues `kernel` on `stream` with `blocks` blocks in one row.
template <typename... Parameters, typename... Arguments>
void launch(Start start, void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes,
            cudaStream_t stream, const Arguments&... arguments) {
  if (blocks == 0) return;
  const void* const function = reinterpret_cast<const void*>(kernel);
  if (shared_bytes > 48 * 1024)  // more must be asked for
    FARSPAN_CUDA(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  cudaLaunchAttribute beside{};
  beside.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  beside.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &beside;
  config.numAttrs = start == Start::beside_previous ? 1 : 0;
  FARSPAN_CUDA(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes, cudaStream_t stream,
            const Arguments&... arguments) {
  launch(Start::behind_previous, kernel, blocks, threads, shared_bytes, stream, arguments...);
}

}  // namespace farspan::cuda
