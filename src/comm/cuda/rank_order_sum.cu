// SPDX-License-Identifier: Apache-2.0
// out[i] = ((x_0[i] + x_1[i]) + x_2[i]) + ...: bound by reading the sources, which may lie in other GPUs' memory. Where
// all addresses have the same place within 16 bytes, 16 bytes are read and written at a time, but for a few elements at
// either end.
#include <algorithm>
#include <bit>

#include "comm/cuda/rank_order_sum.h"
#include "device/cuda/cuda.h"

namespace farspan::cuda {
namespace {

constexpr int kThreads = 256;
// Enough blocks to fill any GPU, each thread then going on from block to block.
constexpr int64_t kMostBlocks = 2048;
constexpr int64_t kVectorBytes = 16;

struct Sources {
  const void* of[kMostSummedRanks];
  int count;
};

template <typename T>
struct alignas(kVectorBytes) Vector {
  static constexpr int kWidth = static_cast<int>(kVectorBytes / sizeof(T));
  T x[kWidth];
};

template <typename T>
__device__ void add(T& sum, const T& x) {
  sum += x;
}

template <typename T>
__device__ void add(Vector<T>& sum, const Vector<T>& x) {
#pragma unroll
  for (int k = 0; k < Vector<T>::kWidth; ++k) sum.x[k] += x.x[k];
}

// Adds element `at` of every source, counted in units of E from an address that is `skip` elements of T on.
template <typename E, typename T>
__device__ E sum_at(const Sources& sources, int64_t skip, int64_t at) {
  const auto element = [&](int source) {
    return reinterpret_cast<const E*>(static_cast<const T*>(sources.of[source]) + skip)[at];
  };
  E sum = element(0);
#pragma unroll 4
  for (int source = 1; source < sources.count; ++source) add(sum, element(source));
  return sum;
}

// Elements [head, head + vectors * kWidth) are summed as vectors, the others one by one.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const __grid_constant__ Sources sources, int64_t head, int64_t vectors, int64_t count, T* out) {
  constexpr int kWidth = Vector<T>::kWidth;
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = first; i < vectors; i += stride)
    reinterpret_cast<Vector<T>*>(out + head)[i] = sum_at<Vector<T>, T>(sources, head, i);
  for (int64_t i = first; i < count - vectors * kWidth; i += stride) {
    const int64_t at = i < head ? i : i + vectors * kWidth;
    out[at] = sum_at<T, T>(sources, 0, at);
  }
}

template <typename T>
void sum(cudaStream_t stream, std::span<const std::byte* const> pointers, int64_t offset, int64_t count, T* out) {
  Sources sources = {};
  sources.count = static_cast<int>(pointers.size());
  const uintptr_t place = reinterpret_cast<uintptr_t>(out) % kVectorBytes;
  bool alike = true;
  for (size_t i = 0; i < pointers.size(); ++i) {
    const T* source = reinterpret_cast<const T*>(pointers[i]) + offset;
    sources.of[i] = source;
    alike = alike && reinterpret_cast<uintptr_t>(source) % kVectorBytes == place;
  }
  constexpr int64_t kWidth = Vector<T>::kWidth;
  const int64_t head = alike ? std::min<int64_t>(count, (kVectorBytes - place) % kVectorBytes / sizeof(T)) : 0;
  const int64_t vectors = alike ? (count - head) / kWidth : 0;
  const int64_t units = std::max(vectors, count - vectors * kWidth);
  const int64_t blocks = std::min(kMostBlocks, (units + kThreads - 1) / kThreads);
  sum_kernel<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(sources, head, vectors, count, out);
  FARSPAN_CUDA_LAUNCHED();
}

}  // namespace

void sum_in_rank_order(cudaStream_t stream, DType dtype, std::span<const std::byte* const> sources, int64_t offset,
                       int64_t count, std::byte* out) {
  FARSPAN_CHECK(std::ssize(sources) <= kMostSummedRanks, "a sum over {} thread ranks on GPUs; at most {}",
                sources.size(), kMostSummedRanks);
  if (count == 0) return;
  if (dtype == DType::f32) {
    sum(stream, sources, offset, count, reinterpret_cast<float*>(out));
  } else {
    sum(stream, sources, offset, count, reinterpret_cast<double*>(out));
  }
}

}  // namespace farspan::cuda
