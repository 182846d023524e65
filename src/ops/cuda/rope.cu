// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/math.h"
#include "ops/cuda/early_launch.cuh"
#include "ops/cuda/ops.h"
#include "ops/cuda/rope_pairs.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/operand_checks.h"

namespace farspan::cuda {
namespace {

constexpr int kThreads = 256;

// As many as travel with one launch; heads of up to 512 channels take one.
constexpr int64_t kPairsPerLaunch = 256;
struct Frequencies {
  double values[kPairsPerLaunch];
};

// Entries of pairs [first, first + count) of each position.
__global__ void __launch_bounds__(kThreads)
    table_kernel(const int64_t* positions, int64_t tokens, const __grid_constant__ Frequencies frequencies,
                 int64_t first, int64_t count, int64_t pairs, double attention_factor, float* table) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < tokens * count; i += step) {
    const int64_t token = i / count, pair = i % count;
    double sine, cosine;
    sincos(static_cast<double>(positions[token]) * frequencies.values[pair], &sine, &cosine);
    float* entry = table + token * 2 * pairs + first + pair;
    entry[0] = static_cast<float>(cosine * attention_factor);
    entry[pairs] = static_cast<float>(sine * attention_factor);
  }
}

struct Apply {
  int64_t tokens, heads, pairs;
  int64_t token_stride, head_stride;
  const float* table;
  float sign;
};

// A block takes blockDim.z tokens; threads (x, y) of a token its vectors of pairs, and its heads in turn, two at a
// time.
template <typename T, int N, RopeStyle kStyle>
__global__ void __launch_bounds__(kThreads, 4) apply_kernel(const Apply apply, T* x) {
  let_next_start();
  await_previous();
  const int64_t vectors = apply.pairs / N;
  const int64_t step = int64_t{gridDim.x} * blockDim.z;
  for (int64_t token = int64_t{blockIdx.x} * blockDim.z + threadIdx.z; token < apply.tokens; token += step) {
    for (int64_t vector = threadIdx.x; vector < vectors; vector += blockDim.x) {
      const int64_t pair = vector * N;
      for (int64_t head = threadIdx.y; head < apply.heads; head += 2 * blockDim.y) {
        T* const channels = x + token * apply.token_stride + head * apply.head_stride;
        T* const others = channels + blockDim.y * apply.head_stride;
        const bool two = head + blockDim.y < apply.heads;
        HeldPairs<T, N, kStyle> held, other;
        held.load(channels, pair, apply.pairs);
        if (two) other.load(others, pair, apply.pairs);
        float cosine[N], sine[N];
        load_angles(apply.table, token, pair, apply.pairs, apply.sign, cosine, sine);
        held.turn(cosine, sine);
        held.store(channels, pair, apply.pairs);
        if (!two) continue;
        other.turn(cosine, sine);
        other.store(others, pair, apply.pairs);
      }
    }
  }
}

template <typename T, int N, RopeStyle kStyle>
void launch(cudaStream_t stream, const Apply& apply, T* x) {
  const int64_t vectors = apply.pairs / N;
  const int64_t head_pairs = ceil_div(apply.heads, 2);
  dim3 block;
  block.x = static_cast<unsigned int>(std::min<int64_t>(vectors, kThreads));
  const int64_t rounds = ceil_div(head_pairs * block.x, kThreads);
  block.y = static_cast<unsigned int>(std::min<int64_t>(ceil_div(head_pairs, rounds), kThreads / block.x));
  block.z = std::min(64u, std::max(1u, kThreads / (block.x * block.y)));
  launch_kernel(Start::early, apply_kernel<T, N, kStyle>, grid_size(ceil_div(apply.tokens, int64_t{block.z})), block, 0,
                stream, apply, x);
}

template <typename T, int N>
void launch(cudaStream_t stream, RopeStyle style, const Apply& apply, T* x) {
  if (style == RopeStyle::half_split)
    launch<T, N, RopeStyle::half_split>(stream, apply, x);
  else
    launch<T, N, RopeStyle::interleaved>(stream, apply, x);
}

}  // namespace

void rope_table(Device& device, const Tensor& positions, std::span<const double> inverse_frequencies,
                double attention_factor, const Tensor& table) {
  if (table.numel() == 0) return;
  const int64_t pairs = std::ssize(inverse_frequencies);
  for (int64_t first = 0; first < pairs; first += kPairsPerLaunch) {
    const int64_t count = std::min(kPairsPerLaunch, pairs - first);
    Frequencies frequencies{};
    std::copy_n(inverse_frequencies.begin() + first, count, frequencies.values);
    const int64_t blocks =
        std::min<int64_t>(ceil_div(positions.numel() * count, kThreads), 8 * properties(device).multiprocessors);
    table_kernel<<<grid_size(blocks), kThreads, 0, compute_stream(device)>>>(
        positions.data<int64_t>(), positions.numel(), frequencies, first, count, pairs, attention_factor,
        table.data<float>());
    FARSPAN_CUDA_LAUNCHED();
  }
}

void rope_apply(Device& device, const Tensor& table, RopeStyle style, RopeDirection direction, const Tensor& x) {
  if (x.numel() == 0) return;
  const cudaStream_t stream = compute_stream(device);
  const Apply apply{.tokens = x.dim(0),
                    .heads = x.dim(1),
                    .pairs = x.dim(2) / 2,
                    .token_stride = x.stride(0),
                    .head_stride = x.stride(1),
                    .table = table.data<float>(),
                    .sign = direction == RopeDirection::forward ? 1.0f : -1.0f};
  with_compute_type(x.dtype(), [&](auto element) {
    using T = decltype(element);
    constexpr int N = kVectorElements<T>;
    // Both halves of a head are whole vectors.
    if (holds_vectors(x, 2 * N) && holds_vectors(table, N))
      launch<T, N>(stream, style, apply, x.data<T>());
    else
      launch<T, 1>(stream, style, apply, x.data<T>());
  });
}

}  // namespace farspan::cuda
