// SPDX-License-Identifier: Apache-2.0
#include "ops/ref/cross_entropy.h"

#include <algorithm>
#include <cmath>

namespace farspan::ref {

CrossEntropy cross_entropy(const Matrix& logits, std::span<const int32_t> targets, double gradient_scale) {
  CrossEntropy result{Matrix(logits.rows, 1), Matrix(logits.rows, logits.columns)};
  for (int64_t t = 0; t < logits.rows; ++t) {
    const int32_t target = targets[static_cast<size_t>(t)];
    if (target < 0) continue;
    double maximum = logits.at(t, 0);
    for (int64_t i = 1; i < logits.columns; ++i) maximum = std::max(maximum, logits.at(t, i));
    double sum = 0;
    for (int64_t i = 0; i < logits.columns; ++i) sum += std::exp(logits.at(t, i) - maximum);
    result.token_loss.at(t, 0) = std::log(sum) + maximum - logits.at(t, target);
    for (int64_t i = 0; i < logits.columns; ++i) {
      const double probability = std::exp(logits.at(t, i) - maximum) / sum;
      result.d_logits.at(t, i) = (probability - (i == target ? 1 : 0)) * gradient_scale;
    }
  }
  return result;
}

}  // namespace farspan::ref
