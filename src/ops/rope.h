// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding: pair i of a head's channels is turned by the angle position * base^(-2i/D).
// Source: Su et al., "RoFormer" (2021), section 3.2.2. Scalings for longer contexts: see RopeSpec.
//
// Angles are computed in fp64 from integer positions and rounded once, to fp32, as cos and sin: at position 131071 an
// angle held in fp32 is already wrong by 8e-3 rad, and in bf16 positions above 256 are not even distinct.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/device.h"
#include "tensor/tensor.h"

namespace farspan {

// The frequencies of a model. Formulas follow Hugging Face transformers, modeling_rope_utils.py.
//   linear   frequencies / factor (Chen et al., "Position Interpolation", 2023)
//   ntk      base * factor^(D / (D - 2)) (NTK-aware scaling; YaRN paper, definition 1)
//   yarn     a ramp between the original and the divided frequencies, over the pairs that turn beta_fast to beta_slow
//   times
//            within original_max_position (Peng et al., "YaRN", 2023, section 3.2)
//   llama3   frequencies whose wave is longer than original_max_position / low_freq_factor are divided, shorter than
//            original_max_position / high_freq_factor are kept, those between are interpolated (Llama 3.1)
struct RopeSpec {
  enum class Scaling { none, linear, ntk, yarn, llama3 };

  int64_t head_dim = 0;
  double base = 10000;
  Scaling scaling = Scaling::none;
  double factor = 1;
  double low_freq_factor = 1;        // llama3
  double high_freq_factor = 4;       // llama3
  double original_max_position = 0;  // yarn, llama3: positions the model was first trained on
  double beta_fast = 32;             // yarn
  double beta_slow = 1;              // yarn
};

// D/2 angles per position, in rad. Throws ConfigError when the spec makes no sense (odd head_dim, base <= 1, factor <
// 1).
std::vector<double> rope_inverse_frequencies(const RopeSpec& spec);

// What cos and sin are multiplied by: yarn's 0.1 ln(factor) + 1 (YaRN, section 3.4), otherwise 1.
double rope_attention_factor(const RopeSpec& spec);

// table (T, 2, D/2) f32: cos then sin of positions (T) i64 times each inverse frequency, times attention_factor.
void rope_table(Device& device, const Tensor& positions, std::span<const double> inverse_frequencies,
                double attention_factor, Tensor table);

// Which channels form pair i: (i, i + D/2), as in Llama's Hugging Face weights, or (2i, 2i + 1), as in the paper.
enum class RopeStyle { half_split, interleaved };

// Backward turns by the opposite angle, which is the transpose of the forward rotation.
enum class RopeDirection { forward, backward };

// Turns x (T, heads, D) in place; f32 or bf16, any outer strides, last stride 1. Row t takes table entry t.
// Throws InternalError on an odd D or shapes that do not fit.
void rope_apply(Device& device, const Tensor& table, RopeStyle style, RopeDirection direction, Tensor x);

}  // namespace farspan
