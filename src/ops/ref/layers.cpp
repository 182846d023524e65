// SPDX-License-Identifier: Apache-2.0
#include "ops/ref/layers.h"

#include <cmath>

#include "base/philox.h"

namespace farspan::ref {

RmsNorm rms_norm_forward(const Matrix& x, const Matrix& weight, double epsilon) {
  RmsNorm norm{Matrix(x.rows, x.columns), Matrix(x.rows, 1)};
  for (int64_t t = 0; t < x.rows; ++t) {
    double mean = 0;
    for (int64_t i = 0; i < x.columns; ++i) mean += x.at(t, i) * x.at(t, i) / static_cast<double>(x.columns);
    const double rstd = 1 / std::sqrt(mean + epsilon);
    norm.rstd.at(t, 0) = rstd;
    for (int64_t i = 0; i < x.columns; ++i) norm.y.at(t, i) = x.at(t, i) * rstd * weight.at(0, i);
  }
  return norm;
}

RmsNormGradients rms_norm_backward(const Matrix& d_y, const Matrix& x, const Matrix& weight, double epsilon) {
  const Matrix rstd = rms_norm_forward(x, weight, epsilon).rstd;
  RmsNormGradients gradients{Matrix(x.rows, x.columns), Matrix(1, x.columns)};
  for (int64_t t = 0; t < x.rows; ++t) {
    double mean = 0;  // of g * xhat
    for (int64_t i = 0; i < x.columns; ++i) {
      const double xhat = x.at(t, i) * rstd.at(t, 0);
      gradients.d_weight.at(0, i) += d_y.at(t, i) * xhat;
      mean += d_y.at(t, i) * weight.at(0, i) * xhat / static_cast<double>(x.columns);
    }
    for (int64_t i = 0; i < x.columns; ++i)
      gradients.d_x.at(t, i) = rstd.at(t, 0) * (d_y.at(t, i) * weight.at(0, i) - x.at(t, i) * rstd.at(t, 0) * mean);
  }
  return gradients;
}

Matrix swiglu_forward(const Matrix& gate_up) {
  const int64_t columns = gate_up.columns / 2;
  Matrix y(gate_up.rows, columns);
  for (int64_t t = 0; t < y.rows; ++t)
    for (int64_t i = 0; i < columns; ++i) {
      const double gate = gate_up.at(t, i), up = gate_up.at(t, columns + i);
      y.at(t, i) = gate / (1 + std::exp(-gate)) * up;
    }
  return y;
}

Matrix swiglu_backward(const Matrix& gate_up, const Matrix& d_y) {
  const int64_t columns = gate_up.columns / 2;
  Matrix d_gate_up(gate_up.rows, gate_up.columns);
  for (int64_t t = 0; t < d_y.rows; ++t)
    for (int64_t i = 0; i < columns; ++i) {
      const double gate = gate_up.at(t, i), up = gate_up.at(t, columns + i);
      const double s = 1 / (1 + std::exp(-gate));
      d_gate_up.at(t, i) = d_y.at(t, i) * up * s * (1 + gate * (1 - s));
      d_gate_up.at(t, columns + i) = d_y.at(t, i) * gate * s;
    }
  return d_gate_up;
}

Matrix rope(const Matrix& x, std::span<const int64_t> positions, std::span<const double> inverse_frequencies,
            RopeStyle style, RopeDirection direction) {
  const int64_t heads = x.rows / static_cast<int64_t>(positions.size()), pairs = x.columns / 2;
  const double sign = direction == RopeDirection::forward ? 1 : -1;
  Matrix y(x.rows, x.columns);
  for (int64_t row = 0; row < x.rows; ++row)
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t first = style == RopeStyle::half_split ? i : 2 * i;
      const int64_t second = style == RopeStyle::half_split ? i + pairs : 2 * i + 1;
      const double angle = sign * static_cast<double>(positions[static_cast<size_t>(row / heads)]) *
                           inverse_frequencies[static_cast<size_t>(i)];
      y.at(row, first) = x.at(row, first) * std::cos(angle) - x.at(row, second) * std::sin(angle);
      y.at(row, second) = x.at(row, first) * std::sin(angle) + x.at(row, second) * std::cos(angle);
    }
  return y;
}

Matrix embedding_forward(std::span<const int32_t> tokens, const Matrix& weight) {
  Matrix y(static_cast<int64_t>(tokens.size()), weight.columns);
  for (int64_t t = 0; t < y.rows; ++t)
    for (int64_t i = 0; i < y.columns; ++i) y.at(t, i) = weight.at(tokens[static_cast<size_t>(t)], i);
  return y;
}

Matrix embedding_backward(std::span<const int32_t> tokens, const Matrix& d_y, int64_t vocabulary) {
  Matrix d_weight(vocabulary, d_y.columns);
  for (int64_t t = 0; t < d_y.rows; ++t)
    for (int64_t i = 0; i < d_y.columns; ++i) d_weight.at(tokens[static_cast<size_t>(t)], i) += d_y.at(t, i);
  return d_weight;
}

Matrix dropped(const Matrix& z, std::span<const int64_t> token_index, const Dropout& dropout) {
  Matrix y(z.rows, z.columns);
  for (int64_t t = 0; t < z.rows; ++t) {
    const Philox draws(dropout.key, static_cast<uint64_t>(token_index[static_cast<size_t>(t)]));
    for (int64_t c = 0; c < z.columns; ++c) {
      const uint32_t draw = draws.block(static_cast<uint64_t>(c / 4))[static_cast<size_t>(c % 4)];
      const bool kept = static_cast<double>(draw) >= dropout.probability * 0x1p32;
      if (kept) y.at(t, c) = z.at(t, c) / (1 - dropout.probability);
    }
  }
  return y;
}

Matrix column_sums(const Matrix& d_y) {
  Matrix sums(1, d_y.columns);
  for (int64_t t = 0; t < d_y.rows; ++t)
    for (int64_t i = 0; i < d_y.columns; ++i) sums.at(0, i) += d_y.at(t, i);
  return sums;
}

}  // namespace farspan::ref
