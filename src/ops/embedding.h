// SPDX-License-Identifier: Apache-2.0
// Token embedding. On a CPU a token outside the vocabulary throws DataError that names its index and id, before
// anything is written; a GPU treats it as another rank's, see below.
#pragma once

#include "device/device.h"
#include "ops/vocabulary_part.h"
#include "tensor/tensor.h"

namespace farspan {

// y (T, H) = rows of weight (V, H) picked by tokens (T) i32. weight and y: one dtype, f32 or bf16, or y f32 for a bf16
// weight; rows may be strided.
void embedding_forward(Device& device, const Tensor& tokens, const Tensor& weight, Tensor y);

// d_weight (V, H) f32 row tokens[t] += d_y (T, H) row t, for every t in ascending order: the same bits for any number
// of threads. d_y f32 or bf16.
void embedding_backward(Device& device, const Tensor& tokens, const Tensor& d_y, Tensor d_weight);

// The same on one rank of several that share the vocabulary: weight and d_weight hold the rows of the part (none is
// fine), tokens are global ids. A token of another rank gives a row of zeros, so that the ranks' y add up to the
// embedding, and adds nothing to d_weight. A token outside [0, part.vocabulary) throws on every rank.
// Source: Shoeybi et al., Megatron-LM (2019), section 3.
void embedding_forward(Device& device, const Tensor& tokens, const Tensor& weight, const VocabularyPart& part,
                       Tensor y);
void embedding_backward(Device& device, const Tensor& tokens, const Tensor& d_y, const VocabularyPart& part,
                        Tensor d_weight);

}  // namespace farspan
