// SPDX-License-Identifier: Apache-2.0
// Dropout on the hidden stream, keyed by what an element is and not by who computes it: the draw depends on (seed,
// step, layer, place, row and position of the token, channel), so every layout, and recomputation, drops the same
// elements.
//
//   dropped(z)_tc = z_tc / (1 - p) where the draw of (token_index[t], c) is at least p, 0 elsewhere
//
// The draw is a 32-bit word of Philox4x32-10 (Salmon et al., 2011; base/philox.h), read as a fraction of 2^32:
//
//   draw(t, c) = Philox(key, token_index[t]).block(c / 4)[c % 4]
//
// What is dropped is selected away: a NaN there does no harm. Calls throw InternalError on misfits and unless 0 <= p
// < 1.
#pragma once

#include <cstdint>
#include <string_view>

#include "device/device.h"
#include "tensor/tensor.h"

namespace farspan {

struct Dropout {
  double probability = 0;  // in [0, 1); 0: nothing is dropped
  uint64_t key = 0;        // dropout_key
};

// One stream of draws per (seed, step, layer, place); `place` is "attention", "attention_output", "mlp" or "embedding".
uint64_t dropout_key(int64_t seed, int64_t step, int64_t layer, std::string_view place);

// y = x + dropped(z). x, y (T, H) f32 or bf16, z (T, H) f32 or bf16, rows may be strided; token_index (T) i64: number
// of the token among all tokens of the data (row * seq_length + position), not looked at when nothing is dropped. y may
// be x or z. x undefined: y = dropped(z). Summed in fp32.
void dropout_add(Device& device, const Dropout& dropout, const Tensor& token_index, const Tensor& x, const Tensor& z,
                 Tensor y);

// d_z = dropped(d_y): the same elements kept and scaled. d_z may be d_y.
void dropout_backward(Device& device, const Dropout& dropout, const Tensor& token_index, const Tensor& d_y, Tensor d_z);

}  // namespace farspan
