// SPDX-License-Identifier: Apache-2.0
// What a layer's forward keeps for its backward. The layer's input is always kept. Everything else is either kept or
// computed again, by the same ops on the same operands, so every policy gives the same bits.
//
//   none       what matrix products and attention gave is kept; what one pass over memory makes again (normalised
//              inputs, the product of gate and up) is not
//   selective  attention output and log-sum-exp are kept, so attention never runs twice; of the rest, what
//              recompute_modules names is computed again: layernorm (normalised inputs), qkv (queries, keys, values),
//              attn_proj (the stream after attention), mlp (gate and up). Empty: all four.
//   full       nothing but the input
#pragma once

#include "config/config.h"

namespace farspan {

struct KeepPolicy {
  bool layernorm = false;
  bool qkv = false;
  bool attention = false;
  bool attn_proj = false;
  bool mlp = false;
};

KeepPolicy keep_policy(const MemoryConfig& config);

}  // namespace farspan
