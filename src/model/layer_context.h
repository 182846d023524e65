// SPDX-License-Identifier: Apache-2.0
// What every layer of one rank shares: where it runs, how it is sized, and the rows it is working on.
#pragma once

#include <cstdint>

#include "config/config.h"
#include "memory/arena.h"
#include "model/keep_policy.h"
#include "ops/rope.h"
#include "parallel/context/context_attention.h"

namespace farspan {

// The local tokens of one micro-batch's rows, on the device. B rows of s tokens each; T = B s.
struct MicroBatch {
  Tensor tokens;      // (T) i32
  Tensor labels;      // (T) i32, kIgnoredLabel where there is no target
  Tensor rope_table;  // (T, 2, D / 2) f32: cosines, sines
  BatchMask mask;
};

struct LayerContext {
  Device& device;
  Arena& arena;
  const ModelConfig& config;
  const ContextAttention& attention;
  KeepPolicy keep;
  DType dtype = DType::f32;  // of activations and compute weights
  int64_t rows = 1;          // B
  int64_t local_length = 0;  // s
  int64_t mlp_tile = 0;      // tokens
  int64_t loss_tile = 0;     // tokens

  int64_t tokens() const { return rows * local_length; }  // T
  RopeStyle rope_style() const { return config.rotary_interleaved ? RopeStyle::interleaved : RopeStyle::half_split; }
  Buffer take(std::string_view name, const Shape& shape, Purpose purpose) const {
    return arena.take(name, dtype, shape, purpose);
  }
  Buffer take_f32(std::string_view name, const Shape& shape, Purpose purpose) const {
    return arena.take(name, DType::f32, shape, purpose);
  }
};

inline Purpose purpose_if(bool kept) { return kept ? Purpose::kept : Purpose::workspace; }

}  // namespace farspan
