// SPDX-License-Identifier: Apache-2.0
#include "observe/profiler_ranges.h"

#include <nvtx3/nvToolsExt.h>
#include <string>

namespace farspan {

void begin_profiler_range(std::string_view name) { nvtxRangePushA(std::string(name).c_str()); }

void end_profiler_range() { nvtxRangePop(); }

}  // namespace farspan
