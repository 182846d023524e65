// SPDX-License-Identifier: Apache-2.0
// RMSNorm of heads and the rotation of what it gives, in one pass. A thread holds the two vectors of N pairs, so that
// whole pairs are in one place; pairs / N threads, a power of two up to a warp, hold a head, and take several heads of a
// token, which turn by the same angles.
#include <algorithm>
#include <bit>
#include <initializer_list>
#include <numeric>

#include "base/math.h"
#include "ops/cuda/early_launch.cuh"
#include "ops/cuda/norm_rows.cuh"
#include "ops/cuda/ops.h"
#include "ops/cuda/partial_rows.h"
#include "ops/cuda/rope_pairs.cuh"
#include "ops/cuda/scratch.h"
#include "ops/operand_checks.h"

namespace farspan::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostInZ = 64;  // threads of a block in its third dimension
// Heads of a thread at once.
constexpr int kForwardHeads = 4, kBackwardHeads = 2;

struct Heads {
  int64_t tokens, heads, pairs;
  int64_t slots;       // of a token: threads for `lanes` of each of its heads, `at_once` heads further each
  float per_column;    // 1 / columns
  const void* weight;  // of the heads' type
  const float* table;
  float* rstd;
  dim3 block;  // lanes of a head, slots, tokens: whole warps

  Heads(const Tensor& x, const Tensor& weight_tensor, const Tensor& table_tensor, const Tensor& rstd_tensor, int n,
        int at_once)
      : tokens(x.dim(0)),
        heads(x.dim(1)),
        pairs(x.dim(2) / 2),
        slots(ceil_div(heads, at_once)),
        per_column(0.5f / static_cast<float>(pairs)),
        weight(weight_tensor.raw()),
        table(table_tensor.data<float>()),
        rstd(rstd_tensor.data<float>()) {
    const int64_t lanes = pairs / n;
    int64_t beside = std::min<int64_t>(slots, kThreads / lanes);
    const auto whole_warps = [&] { return kWarp / std::gcd(int64_t{kWarp}, lanes * beside); };  // of so many tokens
    if (lanes * beside * whole_warps() > kThreads)
      beside = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(beside)));
    const int64_t together = std::min(kMostInZ, round_down(kThreads / (lanes * beside), whole_warps()));
    block = dim3(static_cast<unsigned>(lanes), static_cast<unsigned>(beside), static_cast<unsigned>(together));
  }
  unsigned blocks() const { return grid_size(ceil_div(tokens, int64_t{block.z})); }
  int groups() const { return static_cast<int>(block.y * block.z); }
};

// Calls body(token, slot, whether there are such) for all that are the thread's, together with its whole warp.
template <typename Body>
__device__ __forceinline__ void each_slot(const Heads& heads, const Body& body) {
  for (int64_t first = int64_t{blockIdx.x} * blockDim.z; first < heads.tokens; first += int64_t{gridDim.x} * blockDim.z)
    for (int64_t beside = 0; beside < heads.slots; beside += blockDim.y) {
      const int64_t token = first + threadIdx.z, slot = beside + threadIdx.y;
      body(token, slot, token < heads.tokens && slot < heads.slots);
    }
}

template <typename T, int N, RopeStyle kStyle>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const Heads heads, float epsilon, const NormRows<T> x, const NormRows<T> y) {
  let_next_start();
  await_previous();
  const int lanes = static_cast<int>(blockDim.x);
  const int64_t pair = int64_t{threadIdx.x} * N;
  HeldPairs<T, N, kStyle> weight;
  weight.load(static_cast<const T*>(heads.weight), pair, heads.pairs);
  each_slot(heads, [&](int64_t token, int64_t slot, bool active) {
    HeldPairs<T, N, kStyle> held[kForwardHeads];
    float cosine[N] = {}, sine[N] = {};
#pragma unroll
    for (int j = 0; j < kForwardHeads; ++j) {
      held[j].clear();
      const int64_t head = slot + j * heads.slots;
      if (active && head < heads.heads) held[j].load(x.at({token, head}), pair, heads.pairs);
    }
    if (active) load_angles(heads.table, token, pair, heads.pairs, 1.0f, cosine, sine);
#pragma unroll
    for (int j = 0; j < kForwardHeads; ++j) {
      const int64_t head = slot + j * heads.slots;
      float a[N], b[N], weight_a[N], weight_b[N];
      held[j].get(a, b);
      weight.get(weight_a, weight_b);
      float squares = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) squares += a[i] * a[i] + b[i] * b[i];
      const float rstd = rsqrtf(sum_lanes(squares, lanes) * heads.per_column + epsilon);
      if (!active || head >= heads.heads) continue;
      if (pair == 0) heads.rstd[token * heads.heads + head] = rstd;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        a[i] *= rstd * weight_a[i];
        b[i] *= rstd * weight_b[i];
      }
      turn_pairs<kStyle>(a, b, cosine, sine);
      held[j].set(a, b);
      held[j].store(y.at({token, head}), pair, heads.pairs);
    }
  });
}

template <typename T, int N, RopeStyle kStyle>
__global__ void __launch_bounds__(kThreads, 2)
    backward_kernel(const Heads heads, const NormRows<T> d_y, const NormRows<T> x, const NormRows<T> d_x,
                    float* partial) {
  let_next_start();
  await_previous();
  extern __shared__ __align__(16) float weight_sums[];  // groups, columns
  const int lanes = static_cast<int>(blockDim.x);
  const int64_t pair = int64_t{threadIdx.x} * N;
  HeldPairs<T, N, kStyle> weight;
  weight.load(static_cast<const T*>(heads.weight), pair, heads.pairs);
  float d_weight[2][N] = {};
  each_slot(heads, [&](int64_t token, int64_t slot, bool active) {
    HeldPairs<T, N, kStyle> of_d_y[kBackwardHeads], of_x[kBackwardHeads];
    float rstd[kBackwardHeads], cosine[N] = {}, sine[N] = {};
#pragma unroll
    for (int j = 0; j < kBackwardHeads; ++j) {
      of_d_y[j].clear();
      of_x[j].clear();
      rstd[j] = 0;
      const int64_t head = slot + j * heads.slots;
      if (!active || head >= heads.heads) continue;
      rstd[j] = heads.rstd[token * heads.heads + head];
      of_d_y[j].load(d_y.at({token, head}), pair, heads.pairs);
      of_x[j].load(x.at({token, head}), pair, heads.pairs);
    }
    if (active) load_angles(heads.table, token, pair, heads.pairs, -1.0f, cosine, sine);
#pragma unroll
    for (int j = 0; j < kBackwardHeads; ++j) {
      const int64_t head = slot + j * heads.slots;
      float d_a[N], d_b[N], a[N], b[N], weight_a[N], weight_b[N];
      of_d_y[j].get(d_a, d_b);
      of_x[j].get(a, b);
      weight.get(weight_a, weight_b);
      turn_pairs<kStyle>(d_a, d_b, cosine, sine);
      float dot = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        a[i] *= rstd[j];
        b[i] *= rstd[j];
        d_weight[0][i] += d_a[i] * a[i];
        d_weight[1][i] += d_b[i] * b[i];
        d_a[i] *= weight_a[i];
        d_b[i] *= weight_b[i];
        dot += d_a[i] * a[i] + d_b[i] * b[i];
      }
      const float mean = sum_lanes(dot, lanes) * heads.per_column;
      if (!active || head >= heads.heads) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        d_a[i] = rstd[j] * (d_a[i] - a[i] * mean);
        d_b[i] = rstd[j] * (d_b[i] - b[i] * mean);
      }
      of_d_y[j].set(d_a, d_b);
      of_d_y[j].store(d_x.at({token, head}), pair, heads.pairs);
    }
  });
  const int64_t first_columns[2] = {PairColumns<N, kStyle>::first(pair),
                                    PairColumns<N, kStyle>::second(pair, heads.pairs)};
  leave_partial_row(d_weight, first_columns, 2 * heads.pairs,
                    static_cast<int>(threadIdx.z * blockDim.y + threadIdx.y), static_cast<int>(blockDim.y * blockDim.z),
                    weight_sums, partial + blockIdx.x * 2 * heads.pairs);
}

// Where they do not, one kernel follows the other.
bool hold_vectors(std::initializer_list<Tensor> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const Tensor& tensor) {
    return holds_vectors(tensor, static_cast<int>(16 / size_of(tensor.dtype())));
  });
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
  if (!hold_vectors({x, y, weight, table})) {
    cuda::rms_norm_forward(device, x, weight, epsilon, y, rstd, Tensor());
    return cuda::rope_apply(device, table, style, RopeDirection::forward, y);
  }
  with_type_and_style(x.dtype(), style, [&](auto element, auto of_style) {
    using T = decltype(element);
    constexpr int N = kVectorElements<T>;
    const Heads heads(x, weight, table, rstd, N, kForwardHeads);
    launch_kernel(Start::early, forward_kernel<T, N, decltype(of_style)::value>, heads.blocks(), heads.block, 0,
                  compute_stream(device), heads, static_cast<float>(epsilon), NormRows<T>(x), NormRows<T>(y));
  });
}

void rms_norm_rope_backward(Device& device, const Tensor& d_y, const Tensor& x, const Tensor& weight,
                            const Tensor& rstd, const Tensor& table, RopeStyle style, const Tensor& d_x,
                            const Tensor& d_weight) {
  if (row_count(x) == 0) return;
  if (!hold_vectors({d_y, x, d_x, weight, table})) {
    if (d_x.raw() != d_y.raw()) cuda::cast(device, d_y, d_x);
    cuda::rope_apply(device, table, style, RopeDirection::backward, d_x);
    return cuda::rms_norm_backward(device, d_x, x, weight, rstd, d_x, Accumulate::no, d_weight);
  }
  const cudaStream_t stream = compute_stream(device);
  float* const partial = static_cast<float*>(device.scratch());
  with_type_and_style(x.dtype(), style, [&](auto element, auto of_style) {
    using T = decltype(element);
    constexpr int N = kVectorElements<T>;
    const Heads heads(x, weight, table, rstd, N, kBackwardHeads);
    const int64_t parts = std::min<int64_t>(rms_norm_backward_parts(row_count(x)), heads.blocks());
    const size_t shared = static_cast<size_t>(heads.groups() * x.dim(-1)) * sizeof(float);
    launch_kernel(Start::early, backward_kernel<T, N, decltype(of_style)::value>, grid_size(parts), heads.block, shared,
                  stream, heads, NormRows<T>(d_y), NormRows<T>(x), NormRows<T>(d_x), partial);
    add_partial_rows(stream, partial, parts, x.dim(-1), d_weight.data<float>());
  });
}

}  // namespace farspan::cuda
