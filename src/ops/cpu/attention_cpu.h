// SPDX-License-Identifier: Apache-2.0
// The row-wise ops beside block attention, on the CPU. Arguments as in ops/attention.h, already checked.
#pragma once

#include "ops/attention.h"

namespace farspan::cpu {

void attention_state_init(const Device& device, const Tensor& out, const Tensor& lse);

// x (rows, heads, D) f32 = 0.
void zero_heads(const Device& device, const Tensor& x);

void attention_delta(const Device& device, const Tensor& out, const Tensor& d_out, const Tensor& delta);

}  // namespace farspan::cpu
