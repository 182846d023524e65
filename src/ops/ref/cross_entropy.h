// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "ops/ref/matrix.h"

namespace farspan::ref {

// token_loss (T, 1) and d_logits (T, V) in fp64; see ops/cross_entropy.h.
struct CrossEntropy {
  Matrix token_loss, d_logits;
};
CrossEntropy cross_entropy(const Matrix& logits, std::span<const int32_t> targets, double gradient_scale);

}  // namespace farspan::ref
