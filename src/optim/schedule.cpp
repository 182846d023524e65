// SPDX-License-Identifier: Apache-2.0
#include "optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace farspan {

double learning_rate(const OptimizerConfig& config, int64_t step) {
  const int64_t warmup = config.lr_warmup_iters;
  if (step <= warmup && warmup > 0) return config.lr * static_cast<double>(step) / static_cast<double>(warmup);
  if (config.lr_decay_style == LrDecay::constant) return config.lr;
  const int64_t length = config.lr_decay_iters - warmup;
  const double fraction =
      length <= 0 ? 1.0 : std::min(1.0, static_cast<double>(step - warmup) / static_cast<double>(length));
  const double range = config.lr - config.min_lr;
  if (config.lr_decay_style == LrDecay::linear) return config.lr - range * fraction;
  return config.min_lr + range * 0.5 * (1.0 + std::cos(std::numbers::pi * fraction));
}

}  // namespace farspan
