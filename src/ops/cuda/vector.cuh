// SPDX-License-Identifier: Apache-2.0
// What kernels bound by memory share: vectors of N elements between memory and fp32 registers, sums over the threads of
// a row in a fixed order, and grids over any number of blocks.
//
// N = vector_elements(...) where an operand's addresses allow accesses of 16 bytes, N = 1 elsewhere: one kernel text
// for both.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "device/cuda/cuda.h"
#include "tensor/tensor.h"

namespace farspan::cuda {

inline constexpr int kWarp = 32;

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(BFloat16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

// Two fp32 rounded to bf16 (nearest, ties to even), `low` at the lower address.
__device__ __forceinline__ uint32_t pack_bfloat16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <int kBytes>
using WordOf = std::conditional_t<
    kBytes >= 16, uint4,
    std::conditional_t<kBytes == 8, uint2,
                       std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>>>;

// N elements as they lie in memory, moved by accesses of up to 16 bytes. Addresses are multiples of the access.
template <typename T, int N>
struct Vector {
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  using Word = WordOf<kBytes>;
  static constexpr int kWords = kBytes / static_cast<int>(sizeof(Word));

  Word words[kWords];

  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const Word*>(from)[i];
  }
  // For what is read once: leaves the first-level cache to what all threads share.
  __device__ __forceinline__ void load_once(const T* from) {
    if constexpr (std::is_same_v<Word, uint4>) {
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[i].x), "=r"(words[i].y), "=r"(words[i].z), "=r"(words[i].w)
                     : "l"(reinterpret_cast<const Word*>(from) + i));
    } else {
      load(from);
    }
  }
  __device__ __forceinline__ void store(T* to) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<Word*>(to)[i] = words[i];
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = Word{};
  }

  // Of f32 and bf16 only.
  __device__ __forceinline__ void get(float (&values)[N]) const {
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = reinterpret_cast<const float*>(words)[i];
    } else if constexpr (N == 1) {
      values[0] = __uint_as_float(static_cast<uint32_t>(words[0]) << 16);
    } else {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        const uint32_t pair = reinterpret_cast<const uint32_t*>(words)[i];
        values[2 * i] = __uint_as_float(pair << 16);
        values[2 * i + 1] = __uint_as_float(pair & 0xffff0000u);
      }
    }
  }
  __device__ __forceinline__ void set(const float (&values)[N]) {
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
      for (int i = 0; i < N; ++i) reinterpret_cast<float*>(words)[i] = values[i];
    } else if constexpr (N == 1) {
      words[0] = static_cast<uint16_t>(pack_bfloat16(values[0], 0.0f));
    } else {
#pragma unroll
      for (int i = 0; i < N / 2; ++i)
        reinterpret_cast<uint32_t*>(words)[i] = pack_bfloat16(values[2 * i], values[2 * i + 1]);
    }
  }
};

// f32 or bf16, known at run time only: for a weight or bias that many rows share and the caches hold.
struct AnyFloats {
  const void* data;
  bool bf16;

  explicit AnyFloats(const Tensor& tensor) : data(tensor.raw()), bf16(tensor.dtype() == DType::bf16) {}

  template <int N>
  __device__ __forceinline__ void get(int64_t first, float (&values)[N]) const {
    if (bf16) {
      Vector<BFloat16, N> vector;
      vector.load(static_cast<const BFloat16*>(data) + first);
      vector.get(values);
    } else {
      Vector<float, N> vector;
      vector.load(static_cast<const float*>(data) + first);
      vector.get(values);
    }
  }
};

// Elements of a vector of 16 bytes.
template <typename T>
inline constexpr int kVectorElements = 16 / static_cast<int>(sizeof(T));

// Whether vectors of n elements, the first at column 0 of any row, can be moved by the widest accesses: the columns are
// whole vectors, and address and strides are multiples of an access.
inline bool holds_vectors(const Tensor& tensor, int n) {
  const int64_t access = std::min<int64_t>(16, n * size_of(tensor.dtype()));
  const auto multiple = [access](int64_t bytes) { return bytes % access == 0; };
  if (tensor.dim(-1) % n != 0 || !multiple(static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.raw()))))
    return false;
  for (int i = 0; i + 1 < tensor.rank(); ++i)
    if (tensor.dim(i) > 1 && !multiple(tensor.stride(i) * size_of(tensor.dtype()))) return false;
  return true;
}

// Sums x over the `lanes` (a power of two, at most a warp) threads that follow each other; each of them gets the sum.
// All threads of the warp take part.
__device__ __forceinline__ float sum_lanes(float x, int lanes = kWarp) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    if (offset < lanes) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

__device__ __forceinline__ float max_lanes(float x, int lanes = kWarp) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// Sums each of values[C] over the threads of the block (whole warps; shared: C floats per warp); every thread gets the
// sums. Threads may still read `shared` when others return: before its next use they must meet (__syncthreads).
template <int C>
__device__ __forceinline__ void sum_block(float (&values)[C], float* shared) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
#pragma unroll
  for (int c = 0; c < C; ++c) values[c] = sum_lanes(values[c]);
  if (lane == 0) {
#pragma unroll
    for (int c = 0; c < C; ++c) shared[warp * C + c] = values[c];
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < C; ++c) values[c] = sum_lanes(lane < warps ? shared[lane * C + c] : 0.0f);
}

// Blocks of a grid that walks over `blocks` of them, however many.
inline unsigned int grid_size(int64_t blocks) {
  return static_cast<unsigned int>(std::clamp<int64_t>(blocks, 1, int64_t{1} << 30));
}

}  // namespace farspan::cuda
