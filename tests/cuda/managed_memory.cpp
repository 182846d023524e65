// SPDX-License-Identifier: Apache-2.0
#include "tests/cuda/managed_memory.h"

#include "device/cuda/cuda.h"

namespace farspan::test {

void* allocate_managed(size_t bytes) {
  void* memory = nullptr;
  FARSPAN_CUDA(cudaMallocManaged(&memory, bytes == 0 ? 1 : bytes));
  return memory;
}

void release_managed(void* memory) noexcept { cudaFree(memory); }

void wait_for_gpu() { FARSPAN_CUDA(cudaDeviceSynchronize()); }

}  // namespace farspan::test
