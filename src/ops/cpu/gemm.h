// SPDX-License-Identifier: Apache-2.0
// The implementations that may compute a matrix product on a CPU. m, n and k are at least 1; an addend is c itself, as
// dispatch has put it there.
#pragma once

#include "device/device.h"
#include "ops/gemm_problem.h"

namespace farspan::cpu {

// oneDNN's matmul. Declines types for which the library has nothing better than its own plain loops on this machine.
// Scratch is the library's, in its own mode: its jit GEMM reports 0 bytes, but packs panels of a and b into buffers
// that it allocates in each call and frees again (1.1 to 1.7 MiB measured with 2.6 for 1024^3 and 1536^3 on one and two
// threads).
GemmOutcome gemm_onednn(Device& device, const GemmProblem& problem);

// fp8, and bf16 on machines without bf16 instructions: tiles of a and b are widened to fp32 and multiplied by
// gemm_onednn, which loses nothing, as products and sums are fp32 anyway. Scratch: at most 12 MiB per calling thread,
// kept.
GemmOutcome gemm_widened(Device& device, const GemmProblem& problem);

}  // namespace farspan::cpu
