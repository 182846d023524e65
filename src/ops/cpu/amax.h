// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>

#include "ops/cpu/row_view.h"
#include "ops/operand_checks.h"

namespace farspan::cpu {

// Ordered as the magnitudes are; NaN after infinity.
inline uint32_t magnitude_bits(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }
inline uint32_t magnitude_bits(BFloat16 x) { return static_cast<uint32_t>(x.bits & 0x7fffu) << 16; }

// Raises amax, which other threads may raise too, to the largest magnitude of rows [begin, end).
inline void raise_amax(const RowView& rows, DType dtype, int64_t begin, int64_t end, float& amax) {
  uint32_t largest = 0;
  with_compute_type(dtype, [&](auto element) {
    for (int64_t row = begin; row < end; ++row) {
      const auto* values = rows.row<decltype(element)>(row);
      for (int64_t i = 0; i < rows.columns(); ++i) largest = std::max(largest, magnitude_bits(values[i]));
    }
  });
  const std::atomic_ref<float> shared(amax);
  for (float known = shared; magnitude_bits(known) < largest;)
    if (shared.compare_exchange_weak(known, std::bit_cast<float>(largest))) return;
}

}  // namespace farspan::cpu
