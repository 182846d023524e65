// SPDX-License-Identifier: Apache-2.0
// RMSNorm of heads and the rotation of what it gives, in one pass. A thread holds the two vectors of N pairs, so that
// whole pairs are in one place; pairs / N threads, a power of two up to a warp, hold a head.
#include "base/math.h"
#include "ops/cuda/norm_rows.cuh"
#include "ops/cuda/ops.h"
#include "ops/cuda/partial_rows.h"
#include "ops/cuda/rope_pairs.cuh"
#include "ops/cuda/scratch.h"
#include "ops/operand_checks.h"

namespace farspan::cuda {
namespace {

constexpr int kForwardThreads = 128;
constexpr int kBackwardThreads = 256;

struct Heads {
  int64_t rows, heads, pairs;
  int lanes;
  float per_column;    // 1 / columns
  const void* weight;  // of the heads' type
  const float* table;
  float* rstd;

  Heads(const Tensor& x, const Tensor& weight_tensor, const Tensor& table_tensor, const Tensor& rstd_tensor, int n)
      : rows(row_count(x)),
        heads(heads_of(x)),
        pairs(x.dim(-1) / 2),
        lanes(static_cast<int>(pairs / n)),
        per_column(0.5f / static_cast<float>(pairs)),
        weight(weight_tensor.raw()),
        table(table_tensor.data<float>()),
        rstd(rstd_tensor.data<float>()) {}
};

template <typename T, int N, RopeStyle kStyle>
__global__ void __launch_bounds__(kForwardThreads, 8)
    forward_kernel(const Heads heads, float epsilon, const NormRows<T> x, const NormRows<T> y) {
  const int64_t pair = int64_t{threadIdx.x} % heads.lanes * N;
  const int64_t rows_per_block = kForwardThreads / heads.lanes;
  for (int64_t first = blockIdx.x * rows_per_block; first < heads.rows; first += gridDim.x * rows_per_block) {
    const int64_t row = first + threadIdx.x / heads.lanes;
    const bool active = row < heads.rows;
    const RowIndex index = row_index(active ? row : 0, heads.heads);
    HeldPairs<T, N, kStyle> held, weight;
    held.clear();
    if (active) held.load(x.at(index), pair, heads.pairs);
    float a[N], b[N], weight_a[N], weight_b[N], cosine[N], sine[N];
    load_angles(heads.table, index.token, pair, heads.pairs, 1.0f, cosine, sine);
    weight.load(static_cast<const T*>(heads.weight), pair, heads.pairs);
    weight.get(weight_a, weight_b);
    held.get(a, b);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) squares += a[i] * a[i] + b[i] * b[i];
    squares = sum_lanes(squares, heads.lanes);
    const float rstd = rsqrtf(squares * heads.per_column + epsilon);
    if (!active) continue;
    if (pair == 0) heads.rstd[row] = rstd;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      a[i] *= rstd * weight_a[i];
      b[i] *= rstd * weight_b[i];
    }
    turn_pairs<kStyle>(a, b, cosine, sine);
    held.set(a, b);
    held.store(y.at(index), pair, heads.pairs);
  }
}

constexpr int kRows = 2;  // at a time

template <typename T, int N, RopeStyle kStyle>
__global__ void __launch_bounds__(kBackwardThreads, 2)
    backward_kernel(const Heads heads, const NormRows<T> d_y, const NormRows<T> x, const NormRows<T> d_x,
                    float* partial) {
  using Held = HeldPairs<T, N, kStyle>;
  extern __shared__ float weight_sums[];  // groups, columns
  const int64_t pair = int64_t{threadIdx.x} % heads.lanes * N;
  const int group = static_cast<int>(threadIdx.x) / heads.lanes;
  const int groups = kBackwardThreads / heads.lanes;
  const int64_t rows_per_block = int64_t{groups} * kRows;
  const int64_t step = gridDim.x * rows_per_block;
  const RowIndex step_index = row_index(step, heads.heads), one = row_index(1, heads.heads);
  Held weight;
  weight.load(static_cast<const T*>(heads.weight), pair, heads.pairs);
  float d_weight[2][N] = {};
  int64_t row = blockIdx.x * rows_per_block + int64_t{group} * kRows;
  RowIndex index = row_index(row, heads.heads);
  for (int64_t first = blockIdx.x * rows_per_block; first < heads.rows; first += step) {
    Held of_d_y[kRows], of_x[kRows];
    RowIndex indices[kRows];
    float rstd[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool active = row + r < heads.rows;
      indices[r] = r == 0 ? index : advanced(indices[r - 1], one, heads.heads);
      rstd[r] = active ? heads.rstd[row + r] : 0.0f;
      of_d_y[r].clear();
      of_x[r].clear();
      if (!active) {
        indices[r] = {0, 0};
        continue;
      }
      of_d_y[r].load(d_y.at(indices[r]), pair, heads.pairs);
      of_x[r].load(x.at(indices[r]), pair, heads.pairs);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float d_a[N], d_b[N], a[N], b[N], cosine[N], sine[N], weight_a[N], weight_b[N];
      load_angles(heads.table, indices[r].token, pair, heads.pairs, -1.0f, cosine, sine);
      of_d_y[r].get(d_a, d_b);
      of_x[r].get(a, b);
      weight.get(weight_a, weight_b);
      turn_pairs<kStyle>(d_a, d_b, cosine, sine);
      float dot = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        a[i] *= rstd[r];
        b[i] *= rstd[r];
        d_weight[0][i] += d_a[i] * a[i];
        d_weight[1][i] += d_b[i] * b[i];
        d_a[i] *= weight_a[i];
        d_b[i] *= weight_b[i];
        dot += d_a[i] * a[i] + d_b[i] * b[i];
      }
      const float mean = sum_lanes(dot, heads.lanes) * heads.per_column;
      if (row + r >= heads.rows) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        d_a[i] = rstd[r] * (d_a[i] - a[i] * mean);
        d_b[i] = rstd[r] * (d_b[i] - b[i] * mean);
      }
      of_d_y[r].set(d_a, d_b);
      of_d_y[r].store(d_x.at(indices[r]), pair, heads.pairs);
    }
    row += step;
    index = advanced(index, step_index, heads.heads);
  }
  const int64_t first_columns[2] = {PairColumns<N, kStyle>::first(pair),
                                    PairColumns<N, kStyle>::second(pair, heads.pairs)};
  leave_partial_row(d_weight, first_columns, 2 * heads.pairs, group, groups, weight_sums,
                    partial + blockIdx.x * 2 * heads.pairs);
}

// Calls body(type of the elements, style) with both known at compile time.
template <typename Body>
void with_type_and_style(DType dtype, RopeStyle style, const Body& body) {
  with_compute_type(dtype, [&](auto element) {
    if (style == RopeStyle::half_split)
      body(element, std::integral_constant<RopeStyle, RopeStyle::half_split>{});
    else
      body(element, std::integral_constant<RopeStyle, RopeStyle::interleaved>{});
  });
}

}  // namespace

void rms_norm_rope_forward(Device& device, const Tensor& x, const Tensor& weight, double epsilon, const Tensor& table,
                           RopeStyle style, const Tensor& y, const Tensor& rstd) {
  if (row_count(x) == 0) return;
  with_type_and_style(x.dtype(), style, [&](auto element, auto of_style) {
    using T = decltype(element);
    constexpr int N = kVectorElements<T>;
    const Heads heads(x, weight, table, rstd, N);
    const unsigned int blocks = grid_size(ceil_div(heads.rows, kForwardThreads / heads.lanes));
    forward_kernel<T, N, decltype(of_style)::value><<<blocks, kForwardThreads, 0, compute_stream(device)>>>(
        heads, static_cast<float>(epsilon), NormRows<T>(x), NormRows<T>(y));
    FARSPAN_CUDA_LAUNCHED();
  });
}

void rms_norm_rope_backward(Device& device, const Tensor& d_y, const Tensor& x, const Tensor& weight,
                            const Tensor& rstd, const Tensor& table, RopeStyle style, const Tensor& d_x,
                            const Tensor& d_weight) {
  if (row_count(x) == 0) return;
  const cudaStream_t stream = compute_stream(device);
  float* const partial = static_cast<float*>(device.scratch());
  with_type_and_style(x.dtype(), style, [&](auto element, auto of_style) {
    using T = decltype(element);
    constexpr int N = kVectorElements<T>;
    const Heads heads(x, weight, table, rstd, N);
    const int groups = kBackwardThreads / heads.lanes;
    const int64_t parts = std::min(rms_norm_backward_parts(heads.rows), ceil_div(heads.rows, int64_t{groups} * kRows));
    const size_t shared = static_cast<size_t>(groups * x.dim(-1)) * sizeof(float);
    backward_kernel<T, N, decltype(of_style)::value><<<grid_size(parts), kBackwardThreads, shared, stream>>>(
        heads, NormRows<T>(d_y), NormRows<T>(x), NormRows<T>(d_x), partial);
    FARSPAN_CUDA_LAUNCHED();
    add_partial_rows(stream, partial, parts, x.dim(-1), d_weight.data<float>());
  });
}

}  // namespace farspan::cuda
