// SPDX-License-Identifier: Apache-2.0
// How kernels leave the largest magnitude of what they write (ops/amax.h). Numbers without their sign are ordered as
// integers are, NaN above infinity; so bf16 ones are compared two at a time, and atomics on the bits raise the result.
#pragma once

#include <cstdint>

#include "device/cuda/cuda.h"
#include "ops/cuda/vector.cuh"

namespace farspan::cuda {

// The largest of what one thread has seen.
template <typename T>
struct LargestMagnitude {
  uint32_t bits = 0;  // of bf16: of the even elements in the lower half, the odd in the upper

  template <int N>
  __device__ __forceinline__ void add(const Vector<T, N>& vector) {
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
      for (int i = 0; i < N; ++i) bits = max(bits, reinterpret_cast<const uint32_t*>(vector.words)[i] & 0x7fffffffu);
    } else if constexpr (N == 1) {
      bits = __vmaxu2(bits, vector.words[0] & 0x7fffu);
    } else {
#pragma unroll
      for (int i = 0; i < N / 2; ++i)
        bits = __vmaxu2(bits, reinterpret_cast<const uint32_t*>(vector.words)[i] & 0x7fff7fffu);
    }
  }
  // As a float's bits.
  __device__ __forceinline__ uint32_t as_float_bits() const {
    return std::is_same_v<T, float> ? bits : max(bits << 16, bits & 0xffff0000u);
  }
};

// Raises each *amax[k], which may be null, to the largest of the block's largest[k]. All threads of the block take
// part, once in a kernel.
template <typename T, int K>
__device__ __forceinline__ void raise_amax(const LargestMagnitude<T> (&largest)[K], float* const (&amax)[K]) {
  constexpr int kMostWarps = 32;
  __shared__ uint32_t of_warps[K][kMostWarps];
  bool wanted = false;
#pragma unroll
  for (int k = 0; k < K; ++k) wanted = wanted || amax[k] != nullptr;
  if (!wanted) return;
  const int threads = static_cast<int>(blockDim.x * blockDim.y);
  const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  const int warp = thread / kWarp;
  const uint32_t lanes = 0xffffffffu >> max(0, (warp + 1) * kWarp - threads);  // the last warp need not be whole
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const uint32_t of_warp = __reduce_max_sync(lanes, largest[k].as_float_bits());
    if (thread % kWarp == 0) of_warps[k][warp] = of_warp;
  }
  __syncthreads();
  if (thread >= K) return;
  uint32_t of_block = 0;
  for (int w = 0; w * kWarp < threads; ++w) of_block = max(of_block, of_warps[thread][w]);
  // One a block, whose old value nobody asks for: the block need not wait for it.
#pragma unroll
  for (int k = 0; k < K; ++k)
    if (k == thread && amax[k] != nullptr) atomicMax(reinterpret_cast<uint32_t*>(amax[k]), of_block);
}

inline float* address_of(const Tensor& amax) { return amax.defined() ? amax.data<float>() : nullptr; }

// Before the kernel that raises it.
inline void clear_amax(cudaStream_t stream, const Tensor& amax) {
  if (amax.defined()) FARSPAN_CUDA(cudaMemsetAsync(amax.raw(), 0, sizeof(float), stream));
}

}  // namespace farspan::cuda
