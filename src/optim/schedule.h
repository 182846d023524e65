// SPDX-License-Identifier: Apache-2.0
// Learning rate as a pure function of the step, so that a resumed run cannot advance it twice.
#pragma once

#include <cstdint>

#include "config/config.h"

namespace farspan {

// The rate of `step`, counted from 1. Warm-up rises linearly to lr at step lr_warmup_iters; then the rate falls to
// min_lr at step lr_decay_iters (of which warm-up is part) and stays there.
//   linear: lr - (lr - min_lr) f;  cosine: min_lr + (lr - min_lr) (1 + cos(pi f)) / 2;  f = (step - warmup) / (decay -
//   warmup)
// Source: Loshchilov and Hutter, SGDR (2017), equation 5, without restarts.
double learning_rate(const OptimizerConfig& config, int64_t step);

}  // namespace farspan
