// SPDX-License-Identifier: Apache-2.0
// The update rule: clipping by the global norm, then AdamW or SGD. Weight decay falls on matrices and embeddings, never
// on norms and biases.
// Sources: Loshchilov and Hutter, AdamW (2019), algorithm 2; Pascanu et al. (2013) for clipping by the global norm.
#pragma once

#include <span>

#include "config/config.h"
#include "device/device.h"
#include "tensor/tensor.h"

namespace farspan {

struct UpdateResult {
  double gradient_norm = 0;  // before clipping
  double learning_rate = 0;
  bool skipped = false;  // the norm is infinite or not a number: weights and moments are left alone
};

// The same elements of a rank's state, each (n) and contiguous.
struct UpdateOperands {
  Tensor gradient;       // f32
  Tensor master;         // f32
  Tensor first_moment;   // f32; undefined for SGD
  Tensor second_moment;  // f32
  Tensor compute;        // the copy that layers read, rewritten from the new master; undefined where they read another
  bool decay = true;     // weight decay falls on it
};

class OptimizerStep {
 public:
  // `step` counts from 1; `updates` counts the updates made so far (skipped steps not included) and is what the bias
  // correction uses. `gradient_norm` is the global one.
  OptimizerStep(const OptimizerConfig& config, int64_t step, int64_t updates, double gradient_norm);

  const UpdateResult& result() const { return result_; }
  // Updates elements of parameters. Not to be called when result().skipped.
  void apply(Device& device, std::span<const UpdateOperands> operands) const;

 private:
  const OptimizerConfig& config_;
  int64_t updates_;
  double factor_ = 1;  // of clipping
  UpdateResult result_;
};

}  // namespace farspan
