// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace farspan {

// Whether an op overwrites its output or adds to what is there.
enum class Accumulate { no, yes };

}  // namespace farspan
