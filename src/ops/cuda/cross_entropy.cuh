// SPDX-License-Identifier: Apache-2.0
// Softmax over rows of fp32 logits in registers: the largest logit and the sum of exponentials in one pass, vectors of
// four logits, and the fixed order of the sums over lanes, warps and blocks.
//
// The operations are spelt out where a compiler could choose to fuse them, so that every kernel that sums a row in the
// same order gets the same bits.
#pragma once

#include <cstdint>
#include <limits>

#include "ops/cuda/vector.cuh"

namespace farspan::cuda {

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// exp(x) to 2 units in the last place of 2^(x log2 e), whose exponent is rounded first: within 1e-7 (1 + |x|) of exp(x).
__device__ __forceinline__ float exponential(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(__fmul_rn(x, 1.4426950408889634f)));
  return result;
}

// x_0 . x_1 . ... in pairs, pairs of pairs and so on.
template <int N, typename Operation>
__device__ __forceinline__ float pairwise(const float (&x)[N], const Operation& operation) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    constexpr int kHalf = (N + 1) / 2;
    float half[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) half[i] = i + kHalf < N ? operation(x[i], x[i + kHalf]) : x[i];
    return pairwise(half, operation);
  }
}

// sum exp(x_i - maximum) over the logits seen so far. A NaN or +inf among them makes the sum NaN; with none seen, or
// none but -inf, the maximum is -inf and the sum 0.
struct ExponentialSum {
  float maximum = kMinusInfinity;
  float sum = 0;

  // What exponents are taken from: never -inf, so that exp(-inf - shift) is 0.
  __device__ __forceinline__ float shift() const { return maximum == kMinusInfinity ? 0.0f : maximum; }

  __device__ __forceinline__ void raise(float new_maximum) {
    const float before = maximum;
    maximum = fmaxf(maximum, new_maximum);
    sum = __fmul_rn(sum, exponential(__fsub_rn(before, shift())));
  }
  // -inf adds nothing.
  template <int N>
  __device__ __forceinline__ void add(const float (&x)[N]) {
    raise(pairwise(x, [](float a, float b) { return fmaxf(a, b); }));
    const float from = shift();
    float terms[N];
#pragma unroll
    for (int i = 0; i < N; ++i) terms[i] = exponential(__fsub_rn(x[i], from));
    sum = __fadd_rn(sum, pairwise(terms, [](float a, float b) { return __fadd_rn(a, b); }));
  }
  // Of `lanes` (a power of two) threads that follow each other; each of them gets it.
  __device__ __forceinline__ void combine_lanes(int lanes) {
    raise(max_lanes(maximum, lanes));
    sum = sum_lanes(sum, lanes);
  }
  // Of all threads of the block, kWarps warps; every thread gets it. `shared`: one for each warp, free again after the
  // next barrier.
  template <int kWarps>
  __device__ __forceinline__ void combine_block(ExponentialSum* shared) {
    combine_lanes(kWarp);
    if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = *this;
    __syncthreads();
    *this = shared[threadIdx.x % kWarps];
    combine_lanes(kWarps);
  }
};

// Four elements from `i` of n; those past the end are `otherwise`.
template <bool kVectors>
__device__ __forceinline__ void load_four(const float* from, int64_t i, int64_t n, float (&x)[4], float otherwise) {
  if (kVectors && i + 4 <= n) {
    const float4 v = __ldcs(reinterpret_cast<const float4*>(from + i));
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] = i + e < n ? __ldcs(from + i + e) : otherwise;
}

__device__ __forceinline__ void store_one(float* to, float x) { *to = x; }
__device__ __forceinline__ void store_one(BFloat16* to, float x) {
  to->bits = static_cast<uint16_t>(pack_bfloat16(x, 0.0f));
}

__device__ __forceinline__ void store_four(float* to, const float (&x)[4]) {
  __stcs(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], x[3]));
}
__device__ __forceinline__ void store_four(BFloat16* to, const float (&x)[4]) {
  __stcs(reinterpret_cast<uint2*>(to), make_uint2(pack_bfloat16(x[0], x[1]), pack_bfloat16(x[2], x[3])));
}

// Those of four elements from `i` that are among n.
template <typename T>
__device__ __forceinline__ void store_four(T* to, int64_t i, int64_t n, bool vectors, const float (&x)[4]) {
  if (vectors && i + 4 <= n) return store_four(to + i, x);
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (i + e < n) store_one(to + i + e, x[e]);
}

// Rows of vectors of four, but for what is left at their ends.
inline bool rows_hold_fours(const Tensor& rows) {
  const int64_t bytes = 4 * size_of(rows.dtype());
  return reinterpret_cast<uintptr_t>(rows.raw()) % bytes == 0 && rows.stride(0) % 4 == 0;
}

}  // namespace farspan::cuda
