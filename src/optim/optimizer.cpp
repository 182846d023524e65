// SPDX-License-Identifier: Apache-2.0
#include "optim/optimizer.h"

#include <cmath>
#include <vector>

#include "ops/optimizer_step.h"
#include "optim/schedule.h"

namespace farspan {
namespace {

// Norms this close to the limit are left as they are; the term keeps the quotient finite (Megatron-LM, PyTorch: 1e-6).
constexpr double kClipEpsilon = 1e-6;

double clip_factor(double limit, double norm) {
  return limit > 0 && norm > limit ? limit / (norm + kClipEpsilon) : 1.0;
}

}  // namespace

OptimizerStep::OptimizerStep(const OptimizerConfig& config, int64_t step, int64_t updates, double gradient_norm)
    : config_(config), updates_(updates), factor_(clip_factor(config.clip_grad, gradient_norm)) {
  result_.gradient_norm = gradient_norm;
  result_.learning_rate = learning_rate(config, step);
  result_.skipped = !std::isfinite(gradient_norm);
}

void OptimizerStep::apply(Device& device, std::span<const UpdateOperands> operands) const {
  const auto weight_decay = [&](const UpdateOperands& x) { return x.decay ? config_.weight_decay : 0.0; };
  if (config_.optimizer == OptimizerKind::adamw) {
    const AdamWStep adamw = {.lr = result_.learning_rate,
                             .beta1 = config_.adam_beta1,
                             .beta2 = config_.adam_beta2,
                             .epsilon = config_.adam_eps,
                             .step = updates_ + 1,
                             .gradient_scale = factor_};
    std::vector<AdamWTensors> tensors;
    for (const UpdateOperands& x : operands)
      tensors.push_back({x.gradient, x.master, x.first_moment, x.second_moment, x.compute, weight_decay(x)});
    adamw_step_many(device, adamw, tensors);
  } else {
    for (const UpdateOperands& x : operands) {
      const SgdStep sgd = {.lr = result_.learning_rate, .weight_decay = weight_decay(x), .gradient_scale = factor_};
      sgd_step(device, sgd, x.gradient, x.master, x.compute);
    }
  }
}

}  // namespace farspan
