// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "ops/attention_implementation.h"

namespace farspan::cuda {

// What attends on a CUDA device, in the order of trying; empty where there is no CUDA.
std::span<const AttentionImplementation> attention_implementation_list();

// As farspan::attention_reads_delta.
bool attention_reads_delta(const Device& device, const AttentionBlock& block);

}  // namespace farspan::cuda
