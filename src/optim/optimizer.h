// SPDX-License-Identifier: Apache-2.0
// The update of one rank's weights from summed gradients: global norm, clipping, AdamW or SGD. Weight decay falls on
// matrices and embeddings, never on norms and biases.
// Sources: Loshchilov and Hutter, AdamW (2019), algorithm 2; Pascanu et al. (2013) for clipping by the global norm.
#pragma once

#include "config/config.h"
#include "memory/arena.h"
#include "model/parameters.h"

namespace farspan {

// A rank's flat buffers. All resident; compute is undefined in fp32, where the master weights are computed with.
struct WeightState {
  Buffer master;         // (N) f32
  Buffer compute;        // (N) bf16
  Buffer gradients;      // (N) f32
  Buffer first_moment;   // (N) f32, AdamW only
  Buffer second_moment;  // (N) f32, AdamW only

  const Tensor& compute_weights() const { return compute.taken() ? compute.tensor() : master.tensor(); }
};

WeightState take_weight_state(Arena& arena, const ParameterTable& table, Precision precision, OptimizerKind optimizer);

// Weights alone, for evaluation and generation.
WeightState take_inference_weights(Arena& arena, const ParameterTable& table, Precision precision);

struct UpdateResult {
  double gradient_norm = 0;  // before clipping
  double learning_rate = 0;
  bool skipped = false;  // the norm is infinite or not a number: weights and moments are left alone
};

// One update with the gradients as they stand. `step` counts from 1; `updates` counts the updates made so far (skipped
// steps not included) and is what the bias correction uses. Every rank with the same gradients gets the same bits.
UpdateResult update_weights(Device& device, const OptimizerConfig& config, const ParameterTable& table, int64_t step,
                            int64_t updates, WeightState& state);

}  // namespace farspan
