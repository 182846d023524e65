// SPDX-License-Identifier: Apache-2.0
#include "ops/key_intervals.h"

#include <algorithm>

#include "base/math.h"
#include "device/cuda/cuda.h"
#include "ops/cuda/ops.h"

namespace farspan::cuda {
namespace {

constexpr int kThreads = 256;

struct Pieces {
  int64_t count;
  KeyPiece piece[kMostKeyPieces];
  int64_t ranges;
  QueryRange range[kMostKeyPieces];

  __device__ bool looks_at(int64_t query) const {
    bool within = false;
    for (int64_t i = 0; i < ranges; ++i) within |= query >= range[i].begin && query < range[i].end;
    return within;
  }

  __device__ int64_t keys_before(int64_t position) const {
    int64_t keys = 0;
    for (int64_t i = 0; i < count && piece[i].begin < position; ++i)
      keys += min(position - piece[i].begin, piece[i].length);
    return keys;
  }
};

__global__ void __launch_bounds__(kThreads)
    key_intervals_kernel(const __grid_constant__ Pieces pieces, int64_t count, const int64_t* lo, const int64_t* hi,
                         int64_t* key_lo, int64_t* key_hi) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const bool seeing = pieces.looks_at(i);
  key_lo[i] = seeing ? pieces.keys_before(lo[i]) : 0;
  key_hi[i] = seeing ? pieces.keys_before(hi[i]) : 0;
}

}  // namespace

void key_intervals(Device& device, std::span<const KeyPiece> pieces, std::span<const QueryRange> queries,
                   const Tensor& lo, const Tensor& hi, const Tensor& key_lo, const Tensor& key_hi) {
  if (lo.dim(0) == 0) return;
  Pieces all{};
  all.count = std::ssize(pieces);
  std::copy(pieces.begin(), pieces.end(), all.piece);
  all.ranges = std::ssize(queries);
  std::copy(queries.begin(), queries.end(), all.range);
  key_intervals_kernel<<<static_cast<unsigned>(ceil_div(lo.dim(0), int64_t{kThreads})), kThreads, 0,
                         compute_stream(device)>>>(all, lo.dim(0), lo.data<int64_t>(), hi.data<int64_t>(),
                                                   key_lo.data<int64_t>(), key_hi.data<int64_t>());
  FARSPAN_CUDA_LAUNCHED();
}

}  // namespace farspan::cuda
