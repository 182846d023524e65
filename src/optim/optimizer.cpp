// SPDX-License-Identifier: Apache-2.0
#include "optim/optimizer.h"

#include <cmath>

#include "ops/norms.h"
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

WeightState take_inference_weights(Arena& arena, const ParameterTable& table, Precision precision) {
  const Shape flat = {table.flat_elements()};
  WeightState state;
  state.master = arena.take("weights.master", DType::f32, flat, Purpose::weights);
  if (precision != Precision::fp32) state.compute = arena.take("weights.compute", DType::bf16, flat, Purpose::weights);
  return state;
}

WeightState take_weight_state(Arena& arena, const ParameterTable& table, Precision precision, OptimizerKind optimizer) {
  const Shape flat = {table.flat_elements()};
  WeightState state = take_inference_weights(arena, table, precision);
  state.gradients = arena.take("gradients", DType::f32, flat, Purpose::gradients);
  if (optimizer == OptimizerKind::adamw) {
    state.first_moment = arena.take("optimizer.first_moment", DType::f32, flat, Purpose::optimizer);
    state.second_moment = arena.take("optimizer.second_moment", DType::f32, flat, Purpose::optimizer);
  }
  return state;
}

UpdateResult update_weights(Device& device, const OptimizerConfig& config, const ParameterTable& table, int64_t step,
                            int64_t updates, WeightState& state) {
  UpdateResult result;
  result.learning_rate = learning_rate(config, step);
  result.gradient_norm = std::sqrt(sum_of_squares(device, state.gradients));
  if (!std::isfinite(result.gradient_norm)) {
    result.skipped = true;
    return result;
  }
  const double factor = clip_factor(config.clip_grad, result.gradient_norm);
  for (const Parameter& parameter : table.parameters()) {
    const auto view = [&](const Buffer& flat) { return flat.taken() ? table.view(flat, parameter) : Tensor(); };
    const double decay = parameter.decay ? config.weight_decay : 0.0;
    if (config.optimizer == OptimizerKind::adamw) {
      const AdamWStep adamw = {.lr = result.learning_rate,
                               .beta1 = config.adam_beta1,
                               .beta2 = config.adam_beta2,
                               .epsilon = config.adam_eps,
                               .weight_decay = decay,
                               .step = updates + 1,
                               .gradient_scale = factor};
      adamw_step(device, adamw, view(state.gradients), view(state.master), view(state.first_moment),
                 view(state.second_moment), view(state.compute));
    } else {
      const SgdStep sgd = {.lr = result.learning_rate, .weight_decay = decay, .gradient_scale = factor};
      sgd_step(device, sgd, view(state.gradients), view(state.master), view(state.compute));
    }
  }
  return result;
}

}  // namespace farspan
