// SPDX-License-Identifier: Apache-2.0
// Softmax cross-entropy over the vocabulary, loss and gradient in one go.
//   token_loss = logsumexp(logits) - logits[target]
//   d_logits   = (softmax(logits) - onehot(target)) * gradient_scale
// A target of -1 is ignored: its loss and its whole gradient row are exactly 0 whatever its logits hold, NaN and inf
// included (selected, never multiplied by zero).
#pragma once

#include "device/device.h"
#include "tensor/tensor.h"

namespace farspan {

// logits (T, V) f32, rows may be strided; targets (T) i32 in [-1, V); gradient_scale usually 1 / (number of targets of
// the global batch); token_loss (T) f32; d_logits (T, V) f32 or bf16, undefined for evaluation; an f32 one may be
// logits itself. Throws InternalError on misfits, DataError with index and id on a target outside [-1, V).
void cross_entropy(Device& device, Tensor logits, const Tensor& targets, double gradient_scale, Tensor token_loss,
                   Tensor d_logits);

// Sum of token_loss (T) f32 in fp64, in a fixed order for any number of threads. 0 on the dry device.
double token_loss_sum(Device& device, const Tensor& token_loss);

}  // namespace farspan
