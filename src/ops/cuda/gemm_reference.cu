// SPDX-License-Identifier: Apache-2.0
// The product by plain means, for what the library declines: operands at any stride and address. A block computes a
// tile of c from tiles of a and b in shared memory; each element is one fp32 sum in the order of k.
#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "device/cuda/cuda.h"
#include "ops/cuda/ops.h"

namespace farspan::cuda {
namespace {

constexpr int kTile = 32;  // of c, and the part of k that is in shared memory at a time
constexpr int kRows = 8;   // of threads; each computes kTile / kRows elements of one column
constexpr int kPerThread = kTile / kRows;
constexpr int64_t kMostBlocksDown = 65535;  // a grid's limit in y

__device__ float widened(float value) { return value; }
__device__ float widened(__nv_fp8_e4m3 value) { return static_cast<float>(value); }
__device__ float widened(__nv_fp8_e5m2 value) { return static_cast<float>(value); }
__device__ float widened(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ void narrow(float value, float& to) { to = value; }
__device__ void narrow(float value, __nv_bfloat16& to) { to = __float2bfloat16_rn(value); }

// Where in its tile a thread reads so that a warp reads along the dimension that is dense in memory.
struct Place {
  int row, column;
};
__device__ Place place_in_tile(int64_t column_stride, int i) {
  const int along = threadIdx.x, across = threadIdx.y + i * kRows;
  return column_stride == 1 ? Place{across, along} : Place{along, across};
}

template <typename T>
__device__ void load_tile(const GemmOperand& from, int64_t first_row, int64_t first_column, int64_t rows,
                          int64_t columns, float (&tile)[kTile][kTile + 1]) {
  for (int i = 0; i < kPerThread; ++i) {
    const Place place = place_in_tile(from.column_stride, i);
    const int64_t row = first_row + place.row, column = first_column + place.column;
    tile[place.row][place.column] =
        row < rows && column < columns
            ? widened(static_cast<const T*>(from.data)[row * from.row_stride + column * from.column_stride])
            : 0.0f;
  }
}

struct Sizes {
  int64_t m, n, k;
};

// Ta, Tb: of a and b.
template <typename Ta, typename Tb, typename C>
__global__ void __launch_bounds__(kTile* kRows) multiply(Sizes sizes, GemmOperand a, GemmOperand b, C* c,
                                                         int64_t c_stride, const C* addend, int64_t addend_stride) {
  __shared__ float a_tile[kTile][kTile + 1], b_tile[kTile][kTile + 1];
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kTile;
  for (int64_t first_row = static_cast<int64_t>(blockIdx.y) * kTile; first_row < sizes.m;
       first_row += static_cast<int64_t>(gridDim.y) * kTile) {
    float sums[kPerThread] = {};
    for (int64_t first_k = 0; first_k < sizes.k; first_k += kTile) {
      load_tile<Ta>(a, first_row, first_k, sizes.m, sizes.k, a_tile);
      load_tile<Tb>(b, first_k, first_column, sizes.k, sizes.n, b_tile);
      __syncthreads();
      for (int k = 0; k < kTile; ++k)
        for (int i = 0; i < kPerThread; ++i)
          sums[i] = fmaf(a_tile[threadIdx.y + i * kRows][k], b_tile[k][threadIdx.x], sums[i]);
      __syncthreads();
    }
    const int64_t column = first_column + threadIdx.x;
    for (int i = 0; i < kPerThread; ++i) {
      const int64_t row = first_row + threadIdx.y + i * kRows;
      if (row >= sizes.m || column >= sizes.n) continue;
      if (a.scale != nullptr) sums[i] *= *a.scale * *b.scale;
      if (addend != nullptr) sums[i] += widened(addend[row * addend_stride + column]);
      narrow(sums[i], c[row * c_stride + column]);
    }
  }
}

template <typename Ta, typename Tb, typename C>
void launch(Device& device, const GemmProblem& p) {
  const dim3 blocks(static_cast<unsigned>((p.n + kTile - 1) / kTile),
                    static_cast<unsigned>(std::min((p.m + kTile - 1) / kTile, kMostBlocksDown)));
  multiply<Ta, Tb, C><<<blocks, dim3(kTile, kRows), 0, compute_stream(device)>>>(
      {p.m, p.n, p.k}, p.a, p.b, static_cast<C*>(p.c), p.c_row_stride, static_cast<const C*>(p.addend),
      p.addend_row_stride);
  FARSPAN_CUDA_LAUNCHED();
}

template <typename Ta, typename Tb>
void launch_for_c(Device& device, const GemmProblem& problem) {
  if (problem.c_dtype == DType::f32)
    launch<Ta, Tb, float>(device, problem);
  else
    launch<Ta, Tb, __nv_bfloat16>(device, problem);
}

template <typename Ta>
void launch_for_fp8(Device& device, const GemmProblem& problem) {
  if (problem.b.dtype == DType::f8e4m3)
    launch_for_c<Ta, __nv_fp8_e4m3>(device, problem);
  else
    launch_for_c<Ta, __nv_fp8_e5m2>(device, problem);
}

}  // namespace

GemmOutcome gemm_reference(Device& device, const GemmProblem& problem) {
  if (problem.a.dtype == DType::f32)
    launch<float, float, float>(device, problem);
  else if (problem.a.dtype == DType::bf16)
    launch_for_c<__nv_bfloat16, __nv_bfloat16>(device, problem);
  else if (problem.a.dtype == DType::f8e4m3)
    launch_for_fp8<__nv_fp8_e4m3>(device, problem);
  else
    launch_for_fp8<__nv_fp8_e5m2>(device, problem);
  return {true, "plain loops"};
}

}  // namespace farspan::cuda
