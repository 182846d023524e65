// SPDX-License-Identifier: Apache-2.0
// Our own attention kernels: every mask, any head size up to 256, f32 and bf16, dropout, any strides, results merged
// into the running state inside the kernel. The same bits every time. Products of bf16 run on tensor cores with fp32
// sums, weights and score gradients rounded to bf16 between two products; fp32 is fp32 throughout.
#pragma once

#include <string>

#include "ops/attention.h"
#include "ops/cuda/attention_kernels_scratch.h"

namespace farspan::cuda {

// Why the kernels cannot take a block; empty when they can.
std::string attention_kernel_declines(const AttentionBlock& block);

// As attention_block_forward, with no or any number of keys. With StateUse::begin, `out` may be f32 or the query's
// type.
void attention_kernel_forward(Device& device, const AttentionBlock& block, StateUse use, const Tensor& out,
                              const Tensor& lse);

// As attention_block_backward; what is overwritten may be f32 or the query's type.
void attention_kernel_backward(Device& device, const AttentionBlock& block, const Tensor& d_out, const Tensor& lse,
                               const Tensor& delta, Accumulate d_query_use, Accumulate d_key_value_use,
                               const Tensor& d_query, const Tensor& d_key, const Tensor& d_value);

void attention_state_init(Device& device, const Tensor& out, const Tensor& lse);
void attention_delta(Device& device, const Tensor& out, const Tensor& d_out, const Tensor& delta);

}  // namespace farspan::cuda
