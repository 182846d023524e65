// SPDX-License-Identifier: Apache-2.0
// Block attention by cuDNN: bf16 blocks that are plain or causal and, forward, batches of documents that are. One entry
// of the list in ops/cuda/attention.cpp.
//
// What it does otherwise than the contract says:
//   - Its results are bf16. Where blocks are added up, each block's are rounded once before they are, in fp32.
//   - What is masked inside a tile of keys that some query sees is multiplied by zero there: a NaN in a forbidden value
//     reaches queries up to a tile before it. Finite values never do.
//   - Backward adds up d_query in no fixed order, so it declines where the device is to be deterministic.
#pragma once

#include <string>

#include "ops/attention_implementation.h"

namespace farspan::cuda {

std::string cudnn_forward_declines(Device& device, const AttentionForward& call);
std::string cudnn_backward_declines(Device& device, const AttentionBackward& call);
// Whether cudnn_backward takes blocks with this mask, sizes and place; it may still decline for what else a call has.
bool cudnn_takes_gradients_of(const Device& device, const AttentionBlock& block);
void cudnn_forward(Device& device, const AttentionForward& call);
void cudnn_backward(Device& device, const AttentionBackward& call);

}  // namespace farspan::cuda
