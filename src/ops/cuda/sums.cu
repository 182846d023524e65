// SPDX-License-Identifier: Apache-2.0
// Sums of whole tensors in fp64. A fixed number of blocks share the chunks of all tensors in a fixed way, each leaves one
// sum in the scratch, and one block adds those up: the same order on any GPU.
#include <algorithm>

#include "base/math.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/scratch.h"
#include "ops/cuda/tensor_chunks.cuh"
#include "ops/cuda/vector.cuh"

namespace farspan::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kElements = kVectorElements<float>;
constexpr int kChunk = 16384;  // elements: 8 vectors a thread

enum class Term { value, square };

template <Term term>
__device__ __forceinline__ double term_of(float x) {
  const double wide = static_cast<double>(x);
  return term == Term::square ? wide * wide : wide;
}

__device__ __forceinline__ double sum_lanes_f64(double x) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Over the threads of the block; thread 0 gets the sum.
__device__ __forceinline__ double sum_block_f64(double x) {
  __shared__ double of_warps[kWarp];
  x = sum_lanes_f64(x);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = x;
  __syncthreads();
  if (threadIdx.x >= kWarp) return 0;
  return sum_lanes_f64(threadIdx.x < blockDim.x / kWarp ? of_warps[threadIdx.x] : 0);
}

struct Summand {
  const float* data;
};

// Which thread adds which element, and in which order, does not depend on the address.
template <Term term>
__device__ __forceinline__ double sum_of_thread(const float* x, int64_t n) {
  constexpr int kStep = kThreads * kElements;
  double sum = 0;
  if (n == kChunk && reinterpret_cast<uintptr_t>(x) % 16 == 0) {
    // Whole chunks, their loads under way together.
    float4 vectors[kChunk / kStep];
#pragma unroll
    for (int i = 0; i < kChunk / kStep; ++i)
      vectors[i] = reinterpret_cast<const float4*>(x)[i * kThreads + threadIdx.x];
#pragma unroll
    for (const float4& v : vectors) {
      sum += term_of<term>(v.x);
      sum += term_of<term>(v.y);
      sum += term_of<term>(v.z);
      sum += term_of<term>(v.w);
    }
    return sum;
  }
  for (int64_t i = threadIdx.x * kElements; i < n; i += kStep)
    for (int64_t e = i; e < min(i + kElements, n); ++e) sum += term_of<term>(x[e]);
  return sum;
}

// partial[b] = the sum of block b's chunks, added to what earlier launches left there.
template <Term term, bool kFirst>
__global__ void __launch_bounds__(kThreads) sum_chunks(const __grid_constant__ TensorChunks<Summand> tensors,
                                                       double* partial) {
  double sum = 0;
  for (int64_t chunk = blockIdx.x; chunk < tensors.chunks(); chunk += kSumBlocks) {
    const auto [tensor, begin, length] = tensors.find(chunk, kChunk);
    sum += sum_of_thread<term>(tensors.operands[tensor].data + begin, length);
  }
  sum = sum_block_f64(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = kFirst ? sum : partial[blockIdx.x] + sum;
}

__global__ void __launch_bounds__(kSumBlocks) add_partial_sums(const double* partial, double* total) {
  const double sum = sum_block_f64(partial[threadIdx.x]);
  if (threadIdx.x == 0) *total += sum;
}

template <Term term>
void add_sums(Device& device, std::span<const Tensor> tensors, const Tensor& sum) {
  double* const partial = static_cast<double*>(device.scratch());
  bool first = true;
  for_tables<Summand>(
      tensors, kChunk, [](const Tensor& x) { return Summand{x.data<float>()}; }, [](const Tensor& x) { return x.numel(); },
      [&](const TensorChunks<Summand>& table) {
        const auto kernel = first ? sum_chunks<term, true> : sum_chunks<term, false>;
        kernel<<<kSumBlocks, kThreads, 0, compute_stream(device)>>>(table, partial);
        FARSPAN_CUDA_LAUNCHED();
        first = false;
      });
  if (first) return;
  add_partial_sums<<<1, kSumBlocks, 0, compute_stream(device)>>>(partial, sum.data<double>());
  FARSPAN_CUDA_LAUNCHED();
}

}  // namespace

void token_loss_sum(Device& device, const Tensor& token_loss, const Tensor& sum) {
  add_sums<Term::value>(device, std::span(&token_loss, 1), sum);
}

void sum_of_squares(Device& device, std::span<const Tensor> tensors, const Tensor& sum) {
  add_sums<Term::square>(device, tensors, sum);
}

}  // namespace farspan::cuda
