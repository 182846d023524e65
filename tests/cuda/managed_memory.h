// SPDX-License-Identifier: Apache-2.0
// Memory that the CPU and the GPU both read and write, for operands of tests.
#pragma once

#include <cstddef>

namespace farspan::test {

void* allocate_managed(size_t bytes);
void release_managed(void* memory) noexcept;
// Until all that was queued on any stream is done; throws InternalError where something failed.
void wait_for_gpu();

}  // namespace farspan::test
