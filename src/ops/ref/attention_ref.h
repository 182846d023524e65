// SPDX-License-Identifier: Apache-2.0
// Block attention spelt out in fp64: the formulas of ops/attention.h, one query or one key at a time. What the other
// implementations are tested against, and what runs when all of them decline. Takes any head size.
#pragma once

#include <string>

#include "ops/attention.h"

namespace farspan::ref {

// As attention_block_forward; scores and sums in fp64, out and lse rounded to fp32 once.
void attention_forward(const Device& device, const AttentionBlock& block, const Tensor& out, const Tensor& lse);

// As attention_block_backward; every gradient is summed over the block in fp64 and added in fp32 once.
void attention_backward(const Device& device, const AttentionBlock& block, const Tensor& d_out, const Tensor& lse,
                        const Tensor& delta, const Tensor& d_query, const Tensor& d_key, const Tensor& d_value);

}  // namespace farspan::ref
