// SPDX-License-Identifier: Apache-2.0
// The pairs of a head's channels that turn together, N of them at a time in one thread.
#pragma once

#include <cstdint>

#include "ops/cuda/vector.cuh"
#include "ops/rope.h"

namespace farspan::cuda {

// Where the two vectors begin that hold the N pairs from `pair` on, in a head of `pairs` pairs. half_split: one in each
// half; interleaved: one after the other.
template <int N, RopeStyle kStyle>
struct PairColumns {
  static __device__ __forceinline__ int64_t first(int64_t pair) {
    return kStyle == RopeStyle::half_split ? pair : 2 * pair;
  }
  static __device__ __forceinline__ int64_t second(int64_t pair, int64_t pairs) {
    return kStyle == RopeStyle::half_split ? pairs + pair : 2 * pair + N;
  }
};

__device__ __forceinline__ void turn_pair(float& x, float& y, float cosine, float sine) {
  const float turned = x * cosine - y * sine;
  y = y * cosine + x * sine;
  x = turned;
}

// a, b: the two vectors of N pairs.
template <RopeStyle kStyle, int N>
__device__ __forceinline__ void turn_pairs(float (&a)[N], float (&b)[N], const float (&cosine)[N],
                                           const float (&sine)[N]) {
  if constexpr (kStyle == RopeStyle::half_split || N == 1) {
#pragma unroll
    for (int i = 0; i < N; ++i) turn_pair(a[i], b[i], cosine[i], sine[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      turn_pair(a[2 * i], a[2 * i + 1], cosine[i], sine[i]);
      turn_pair(b[2 * i], b[2 * i + 1], cosine[N / 2 + i], sine[N / 2 + i]);
    }
  }
}

template <typename T, int N, RopeStyle kStyle>
struct HeldPairs {
  using Columns = PairColumns<N, kStyle>;
  Vector<T, N> first, second;

  __device__ __forceinline__ void load(const T* channels, int64_t pair, int64_t pairs) {
    first.load_once(channels + Columns::first(pair));
    second.load_once(channels + Columns::second(pair, pairs));
  }
  __device__ __forceinline__ void clear() {
    first.clear();
    second.clear();
  }
  __device__ __forceinline__ void store(T* channels, int64_t pair, int64_t pairs) const {
    first.store(channels + Columns::first(pair));
    second.store(channels + Columns::second(pair, pairs));
  }
  __device__ __forceinline__ void get(float (&a)[N], float (&b)[N]) const {
    first.get(a);
    second.get(b);
  }
  __device__ __forceinline__ void turn(const float (&cosine)[N], const float (&sine)[N]) {
    float a[N], b[N];
    get(a, b);
    turn_pairs<kStyle>(a, b, cosine, sine);
    set(a, b);
  }
  __device__ __forceinline__ void set(const float (&a)[N], const float (&b)[N]) {
    first.set(a);
    second.set(b);
  }
};

// The entries of the pairs from `pair` on in a (T, 2, pairs) table; sign -1 turns back.
template <int N>
__device__ __forceinline__ void load_angles(const float* table, int64_t token, int64_t pair, int64_t pairs, float sign,
                                            float (&cosine)[N], float (&sine)[N]) {
  const float* entry = table + token * 2 * pairs + pair;
  Vector<float, N> of_cosine, of_sine;
  of_cosine.load(entry);
  of_sine.load(entry + pairs);
  of_cosine.get(cosine);
  of_sine.get(sine);
#pragma unroll
  for (int i = 0; i < N; ++i) sine[i] *= sign;
}

}  // namespace farspan::cuda
