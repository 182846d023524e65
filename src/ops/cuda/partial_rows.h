// SPDX-License-Identifier: Apache-2.0
// Sums over all tokens without atomics: blocks of a kernel leave a row of partial sums each, and this adds the rows up,
// always in the same order.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace farspan::cuda {

// target[c] += sum over rows of partial[row * columns + c], for c in [0, columns).
void add_partial_rows(cudaStream_t stream, const float* partial, int64_t rows, int64_t columns, float* target);

}  // namespace farspan::cuda
