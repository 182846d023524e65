// SPDX-License-Identifier: Apache-2.0
// Named ranges of a thread's time that NVIDIA's profilers show (NVTX). They nest. Without such a profiler attached, and
// in a program built without CUDA, they do nothing.
#pragma once

#include <string_view>

namespace farspan {

void begin_profiler_range(std::string_view name);
void end_profiler_range();

}  // namespace farspan
