// SPDX-License-Identifier: Apache-2.0
// Adds what another library computed for some keys to the running state of the same queries.
#pragma once

#include "ops/attention.h"

namespace farspan::cuda {

// out (n, A, D) f32 or bf16 and lse (A, n) f32: the state. partial (n, A, D) bf16 and partial_lse (A, n) f32: the
// result for other keys; -inf in partial_lse says that a query saw none of them, and its partial is not read. With
// StateUse::begin the state is written as if it had been empty. In fp32, each output rounded once.
void attention_merge(Device& device, const Tensor& partial, const Tensor& partial_lse, StateUse use, const Tensor& out,
                     const Tensor& lse);

}  // namespace farspan::cuda
