// SPDX-License-Identifier: Apache-2.0
// One optimizer step over one parameter or many. All tensors have one shape and are contiguous; gradient, weight, m and
// v are f32; compute_weight is the copy that the model reads, f32 or bf16, rewritten from the new weight, or undefined.
// Throws InternalError on misfits.
#pragma once

#include <cstdint>
#include <span>

#include "device/device.h"
#include "tensor/tensor.h"

namespace farspan {

// AdamW. Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2, decay scaled by lr
// as in PyTorch and applied before the update:
//   w *= 1 - lr * weight_decay
//   m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
//   w -= lr * (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + epsilon)
// where g = gradient * gradient_scale. A gradient of exactly zero with zero moments leaves w to the decay alone.
struct AdamWStep {
  double lr = 0;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0;
  int64_t step = 1;           // counted from 1
  double gradient_scale = 1;  // the factor of gradient clipping
};
void adamw_step(Device& device, const AdamWStep& adamw, const Tensor& gradient, Tensor weight, Tensor m, Tensor v,
                Tensor compute_weight);

// The same over many parameters at once, each with its own decay: on a GPU a few kernels in all, where one each would
// spend more time on launches than on the small ones. adamw.weight_decay is not read. No two share memory, but for
// gradients.
struct AdamWTensors {
  Tensor gradient, weight, m, v;
  Tensor compute_weight;  // or undefined
  double weight_decay = 0;
};
void adamw_step_many(Device& device, const AdamWStep& adamw, std::span<const AdamWTensors> tensors);

// Plain gradient descent:  w = w * (1 - lr * weight_decay) - lr * gradient * gradient_scale
struct SgdStep {
  double lr = 0;
  double weight_decay = 0;
  double gradient_scale = 1;
};
void sgd_step(Device& device, const SgdStep& sgd, const Tensor& gradient, Tensor weight, Tensor compute_weight);

}  // namespace farspan
