// SPDX-License-Identifier: Apache-2.0
// In place of managed_memory.cpp where there is no CUDA toolkit. Tests do not run on GPUs there.
#include "base/error.h"
#include "tests/cuda/managed_memory.h"

namespace farspan::test {

void* allocate_managed(size_t) { throw InternalError("these tests were built without CUDA"); }
void release_managed(void*) noexcept {}
void wait_for_gpu() {}

}  // namespace farspan::test
