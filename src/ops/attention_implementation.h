// SPDX-License-Identifier: Apache-2.0
// The ordered list behind attention_block_forward and attention_block_backward. Tests run every entry of it.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "ops/attention.h"

namespace farspan {

// One way to compute attention on the CPU. Tensors arrive checked, with at least one query, key and head.
struct AttentionImplementation {
  std::string_view name;

  // Why this implementation cannot take the block; empty when it can.
  std::string (*declines)(const AttentionBlock& block);

  // As attention_block_forward.
  void (*forward)(const Device& device, const AttentionBlock& block, const Tensor& out, const Tensor& lse);

  // As attention_block_backward.
  void (*backward)(const Device& device, const AttentionBlock& block, const Tensor& d_out, const Tensor& lse,
                   const Tensor& delta, const Tensor& d_query, const Tensor& d_key, const Tensor& d_value);
};

// In the order they are tried; the last takes every block.
std::span<const AttentionImplementation> attention_implementation_list();

}  // namespace farspan
