// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tensor/dtype.h"

namespace farspan {

// out[i] = ((x_0[i] + x_1[i]) + x_2[i]) + ... in the type itself (f32 or f64), where x_q are `count` elements that
// start at element `offset` of sources[q]. `out` may be the summed part of one of the sources. No scratch memory, and
// the same bits whoever sums: every backend's sums are this one.
void sum_in_rank_order(DType dtype, std::span<const std::byte* const> sources, int64_t offset, int64_t count,
                       std::byte* out);

}  // namespace farspan
