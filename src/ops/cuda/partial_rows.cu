// SPDX-License-Identifier: Apache-2.0
#include "base/math.h"
#include "ops/cuda/early_launch.cuh"
#include "ops/cuda/partial_rows.h"
#include "ops/cuda/vector.cuh"

namespace farspan::cuda {
namespace {

constexpr int kShares = 32;  // warps of a block; each sums every kShares-th row

__global__ void __launch_bounds__(kWarp* kShares)
    add_partial_rows_kernel(const float* partial, int64_t rows, int64_t columns, float* target) {
  let_next_start();
  await_previous();
  __shared__ float sums[kShares][kWarp];
  const int lane = static_cast<int>(threadIdx.x), share = static_cast<int>(threadIdx.y);
  for (int64_t first = int64_t{blockIdx.x} * kWarp; first < columns; first += int64_t{gridDim.x} * kWarp) {
    const int64_t column = first + lane;
    float sum = 0;
    if (column < columns) {
#pragma unroll 8
      for (int64_t row = share; row < rows; row += kShares) sum += partial[row * columns + column];
    }
    sums[share][lane] = sum;
    __syncthreads();
    if (share == 0 && column < columns) {
      float total = sums[0][lane];
#pragma unroll
      for (int i = 1; i < kShares; ++i) total += sums[i][lane];
      target[column] += total;
    }
    __syncthreads();
  }
}

}  // namespace

void add_partial_rows(cudaStream_t stream, const float* partial, int64_t rows, int64_t columns, float* target) {
  if (columns == 0) return;
  launch_kernel(Start::early, add_partial_rows_kernel, grid_size(ceil_div(columns, kWarp)), dim3(kWarp, kShares), 0,
                stream, partial, rows, columns, target);
}

}  // namespace farspan::cuda
