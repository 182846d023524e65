// SPDX-License-Identifier: Apache-2.0
// The ordered lists behind attention_block_forward and attention_block_backward, one for each kind of device. Tests run
// every entry of them.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "ops/attention.h"

namespace farspan {

// The arguments of attention_block_forward. Checked, with at least one query, key and head.
struct AttentionForward {
  AttentionBlock block;
  StateUse use = StateUse::add;
  Tensor out = {};
  Tensor lse = {};
};

// The arguments of attention_block_backward, likewise.
struct AttentionBackward {
  AttentionBlock block;
  Tensor out = {};
  Tensor d_out = {};
  Tensor lse = {};
  Tensor delta = {};
  Accumulate d_query_use = Accumulate::yes;
  Accumulate d_key_value_use = Accumulate::yes;
  Tensor d_query = {};
  Tensor d_key = {};
  Tensor d_value = {};
};

// One way to compute attention on one kind of device.
struct AttentionImplementation {
  std::string_view name;

  // Why this implementation cannot take a call; empty when it can. Looks at sizes, types, strides and runs, never at
  // the device's memory.
  std::string (*forward_declines)(Device& device, const AttentionForward& call);
  std::string (*backward_declines)(Device& device, const AttentionBackward& call);

  void (*forward)(Device& device, const AttentionForward& call);
  void (*backward)(Device& device, const AttentionBackward& call);
};

// In the order they are tried. The CPU's last takes every block. cuda: empty where the program is built without CUDA.
std::span<const AttentionImplementation> attention_implementation_list(DeviceKind kind = DeviceKind::cpu);

// Bytes of Device::scratch for a call on this device.
int64_t scratch_bytes(const Device& device, const AttentionForward& call);
int64_t scratch_bytes(const Device& device, const AttentionBackward& call);

// Runs the first implementation of the device's list that does not decline; throws InternalError with all reasons when
// there is none.
void attend_forward_by_choice(Device& device, const AttentionForward& call);
void attend_backward_by_choice(Device& device, const AttentionBackward& call);

}  // namespace farspan
