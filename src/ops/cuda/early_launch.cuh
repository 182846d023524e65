// SPDX-License-Identifier: Apache-2.0
// Kernels whose blocks are set up while the kernel queued before them still runs (programmatic dependent launch, CUDA
// Programming Guide). Between two kernels of some microseconds each it takes two or three to end one and begin the
// other; so much of that as does not touch memory then goes on beside the end of the first.
#pragma once

#include <cuda_runtime.h>

#include "device/cuda/cuda.h"

namespace farspan::cuda {

enum class Start {
  when_previous_ended,
  // When all blocks of the kernel before have ended or called let_next_start(). Every block calls await_previous()
  // before it reads or writes memory. A kernel that has nothing to do with the one before may let a single block call
  // it, if that one did not start early itself, so that all before it has ended: whoever comes behind then still comes
  // behind both.
  early
};

// The next kernel, if it starts early, may; called again it changes nothing.
__device__ inline void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Returns when the kernel before has ended and what it wrote is there; at once where this one did not start early.
__device__ inline void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template <typename... Parameters, typename... Arguments>
void launch_kernel(Start start, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = start == Start::early ? 1 : 0;
  FARSPAN_CUDA(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

}  // namespace farspan::cuda
