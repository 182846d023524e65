// SPDX-License-Identifier: Apache-2.0
// What a draw decides, and where the draws of attention come from: shared by hidden and attention dropout on every
// device, so that they cannot differ.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/error.h"
#include "base/philox.h"
#include "ops/attention.h"

namespace farspan {

// An element is dropped when its 32-bit draw is below the threshold, else multiplied by `scale`. The share dropped is
// the probability to within 2^-32.
struct DropoutRule {
  DropoutRule() = default;
  // Throws InternalError unless 0 <= probability < 1.
  explicit DropoutRule(double probability) {
    FARSPAN_CHECK(probability >= 0 && probability < 1, "dropout: probability {}, needs at least 0 and less than 1",
                  probability);
    threshold = static_cast<uint32_t>(std::min(std::round(probability * 0x1p32), 0x1p32 - 1));
    scale = static_cast<float>(1 / (1 - probability));
  }

  bool drops(uint32_t draw) const { return draw < threshold; }

  uint32_t threshold = 0;
  float scale = 1;
};

// The key of the draws of one query head of a block.
inline uint64_t attention_draw_key(const AttentionDropout& dropout, int64_t head) {
  const Philox::Block words =
      Philox(dropout.key, static_cast<uint64_t>(dropout.row)).block(static_cast<uint64_t>(dropout.first_head + head));
  return static_cast<uint64_t>(words[1]) << 32 | words[0];
}

}  // namespace farspan
