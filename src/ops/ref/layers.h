// SPDX-License-Identifier: Apache-2.0
// The layers' operators in fp64, written as their formulas read; see ops/rms_norm.h, ops/swiglu.h, ops/rope.h,
// ops/embedding.h and ops/dropout.h for those. One row per token (or per token and head).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/dropout.h"
#include "ops/ref/matrix.h"
#include "ops/rope.h"

namespace farspan::ref {

// y (T, H), and rstd (T, 1).
struct RmsNorm {
  Matrix y, rstd;
};
RmsNorm rms_norm_forward(const Matrix& x, const Matrix& weight, double epsilon);

// d_x (T, H) and d_weight (1, H).
struct RmsNormGradients {
  Matrix d_x, d_weight;
};
RmsNormGradients rms_norm_backward(const Matrix& d_y, const Matrix& x, const Matrix& weight, double epsilon);

Matrix swiglu_forward(const Matrix& gate_up);
Matrix swiglu_backward(const Matrix& gate_up, const Matrix& d_y);

// x (T * heads, D): row t * heads + h is head h of token t.
Matrix rope(const Matrix& x, std::span<const int64_t> positions, std::span<const double> inverse_frequencies,
            RopeStyle style, RopeDirection direction);

Matrix embedding_forward(std::span<const int32_t> tokens, const Matrix& weight);
Matrix embedding_backward(std::span<const int32_t> tokens, const Matrix& d_y, int64_t vocabulary);

// z and the token of each of its rows.
Matrix dropped(const Matrix& z, std::span<const int64_t> token_index, const Dropout& dropout);

// (1, O): the gradient of a bias.
Matrix column_sums(const Matrix& d_y);

}  // namespace farspan::ref
