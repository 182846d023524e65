// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime.h>
#include <span>

#include "tensor/dtype.h"

namespace farspan::cuda {

// Thread ranks of one group: the addresses of all are handed to the kernel as parameters.
inline constexpr int kMostSummedRanks = 256;

// sum_in_rank_order of comm/rank_order_sum.h, queued on `stream`: the same bits. The GPU must be able to read all
// sources.
void sum_in_rank_order(cudaStream_t stream, DType dtype, std::span<const std::byte* const> sources, int64_t offset,
                       int64_t count, std::byte* out);

}  // namespace farspan::cuda
