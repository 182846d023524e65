// SPDX-License-Identifier: Apache-2.0
// Softmax cross-entropy over the vocabulary, loss and gradient in one go.
//   token_loss = logsumexp(logits) - logits[target]
//   d_logits   = (softmax(logits) - onehot(target)) * gradient_scale
// A target of -1 is ignored: its loss and its whole gradient row are exactly 0 whatever its logits hold, NaN and inf
// included (selected, never multiplied by zero).
#pragma once

#include "device/device.h"
#include "ops/vocabulary_part.h"
#include "tensor/tensor.h"

namespace farspan {

// logits (T, V) f32, rows may be strided; targets (T) i32 in [-1, V); gradient_scale usually 1 / (number of targets of
// the global batch); token_loss (T) f32; d_logits (T, V) f32 or bf16, undefined for evaluation; an f32 one may be
// logits itself. Throws InternalError on misfits, DataError with index and id on a target outside [-1, V)
// (on a CPU; a GPU ignores such targets).
void cross_entropy(Device& device, Tensor logits, const Tensor& targets, double gradient_scale, Tensor token_loss,
                   Tensor d_logits);

// The same over a vocabulary dealt to R ranks, each with the logits of V_local ids, 0 of them at least, from
// part.first_id on. Two numbers a token cross the ranks instead of V logits:
//   1. every rank:  statistics = logsumexp of its own logits, and the target's logit where it holds it
//   2. all ranks' statistics are gathered (R, 2, T)
//   3. every rank:  lse = logsumexp over the ranks;  token_loss = lse - target logit
//   4. every rank:  d_logits = (exp(logits - lse) - onehot(target)) * gradient_scale for its own ids
// Source: Shoeybi et al., Megatron-LM (2019), section 3 (the fused parallel cross-entropy). Ignored targets are
// selected away as above. Targets are global ids; one outside [-1, part.vocabulary) throws DataError on every
// rank.

// logits (T, V_local) f32, rows may be strided; statistics (2, T) f32: row 0 the log-sum-exp, -inf where V_local is 0;
// row 1 the target's logit, 0 where another rank holds it. Both are 0 for ignored targets.
void vocabulary_statistics(Device& device, const Tensor& logits, const Tensor& targets, const VocabularyPart& part,
                           Tensor statistics);

// all (R, 2, T) f32, the ranks' statistics in rank order, in which they are summed, in fp64; lse, token_loss (T) f32.
// Both are 0 for ignored targets.
void combine_statistics(Device& device, const Tensor& all, const Tensor& targets, Tensor lse, Tensor token_loss);

// d_logits (T, V_local) f32 or bf16; an f32 one may be logits itself.
void vocabulary_gradient(Device& device, Tensor logits, const Tensor& targets, const VocabularyPart& part,
                         const Tensor& lse, double gradient_scale, Tensor d_logits);

// sum (1) f64 += token_loss (T) f32, in fp64 and in a fixed order for any number of threads.
void token_loss_sum(Device& device, const Tensor& token_loss, Tensor sum);

}  // namespace farspan
