// SPDX-License-Identifier: Apache-2.0
// Two passes, the largest magnitude and then the rounding; where the op that wrote x left its largest magnitude, the
// second alone.
//
// Floor, for R C elements: 4 R C bytes read (2 with one pass, or where the second finds them in the second-level cache),
// R C written for each copy.
#include <cuda_fp8.h>

#include "base/math.h"
#include "ops/cuda/amax.cuh"
#include "ops/cuda/early_launch.cuh"
#include "ops/cuda/ops.h"
#include "ops/cuda/vector.cuh"

namespace farspan::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8;  // a vector of 16 bytes

// A matrix to be measured. Dense rows come as one.
struct MeasuredMatrix {
  const BFloat16* x = nullptr;
  int64_t stride = 0, rows = 0;
  int64_t vectors = 0;  // of a row
  bool aligned = false;
};

MeasuredMatrix measured_matrix(const Tensor& x) {
  MeasuredMatrix m{.x = x.data<BFloat16>(),
                   .stride = x.dim(0) <= 1 ? x.dim(1) : x.stride(0),
                   .rows = x.dim(0),
                   .vectors = x.dim(1) / kElements,
                   .aligned = holds_vectors(x, kElements)};
  if (m.stride == x.dim(1)) {
    m.vectors *= m.rows;
    m.rows = 1;
  }
  return m;
}

struct MeasuredMatrices {
  MeasuredMatrix of[kMostMeasured];
};

// blockIdx.y: the matrix.
__global__ void __launch_bounds__(kThreads) largest_magnitude(const MeasuredMatrices matrices, float* amax) {
  const MeasuredMatrix& m = matrices.of[blockIdx.y];
  LargestMagnitude<BFloat16> largest[1];
  const int64_t all = m.rows * m.vectors, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < all; i += step) {
    const BFloat16* from = m.x + (m.rows == 1 ? i * kElements : i / m.vectors * m.stride + i % m.vectors * kElements);
    if (m.aligned) {
      Vector<BFloat16, kElements> vector;
      vector.load(from);
      largest[0].add(vector);
    } else {
      for (int k = 0; k < kElements; ++k) {
        Vector<BFloat16, 1> element;
        element.load(from + k);
        largest[0].add(element);
      }
    }
  }
  raise_amax(largest, {amax + blockIdx.y});
}

// A block's tile: as many rows as fill a line of 128 bytes of the transposed copy.
constexpr int kTileRows = 128;
constexpr int kTileColumns = 64;
constexpr int kRowsOfThread = 4;  // one 32-bit word of each of its columns
constexpr int kWords = kTileRows / kRowsOfThread;
static_assert(kThreads == kWords * (kTileColumns / kElements));

template <__nv_fp8_interpretation_t kFormat>
__device__ __forceinline__ uint32_t round_four(const float* values) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(values[0], values[1]), __NV_SATFINITE, kFormat);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(values[2], values[3]), __NV_SATFINITE, kFormat);
  return low | high << 16;
}

struct QuantiseArguments {
  const BFloat16* x;
  int64_t stride, rows, columns;
  bool aligned;
  uint8_t* values;      // null: not written
  uint8_t* transposed;  // null: not written
  int64_t pitch;        // of a transposed row
  const float* amax;
  float* scale;
};

template <__nv_fp8_interpretation_t kFormat>
__global__ void __launch_bounds__(kThreads) quantise(const QuantiseArguments a) {
  let_next_start();
  await_previous();
  constexpr int kLargestExponent = kFormat == __NV_E4M3 ? kE4M3.largest_exponent : kE5M2.largest_exponent;
  __shared__ uint32_t words[kTileColumns][kWords + 1];
  const uint32_t magnitude = __float_as_uint(*a.amax);
  const bool finite = magnitude < 0x7f800000u;
  const int exponent = finite ? fp8_scale_exponent(magnitude, kLargestExponent) : 0;
  const float factor = __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
  if (blockIdx.x == 0 && threadIdx.x == 0)
    *a.scale = finite ? __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23) : __uint_as_float(0x7fc00000u);

  const int64_t tiles_across = (a.columns + kTileColumns - 1) / kTileColumns;
  const int64_t first_row = blockIdx.x / tiles_across * kTileRows;
  const int64_t first_column = blockIdx.x % tiles_across * kTileColumns;
  // Eight threads side by side read 128 bytes of a row; a thread's four rows lie together.
  const int word = static_cast<int>(threadIdx.x) / (kTileColumns / kElements);
  const int column = static_cast<int>(threadIdx.x) % (kTileColumns / kElements) * kElements;
  const bool inside = first_column + column < a.columns;
  uint32_t rounded[kRowsOfThread][2];
#pragma unroll
  for (int r = 0; r < kRowsOfThread; ++r) {
    const int64_t row = first_row + word * kRowsOfThread + r;
    float values[kElements] = {};
    if (inside && row < a.rows) {
      const BFloat16* from = a.x + row * a.stride + first_column + column;
      if (a.aligned) {
        Vector<BFloat16, kElements> vector;
        vector.load(from);
        vector.get(values);
      } else {
        for (int k = 0; k < kElements; ++k) values[k] = as_float(from[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kElements; ++k) values[k] *= factor;
    rounded[r][0] = round_four<kFormat>(values);
    rounded[r][1] = round_four<kFormat>(values + 4);
    if (inside && row < a.rows && a.values != nullptr)
      *reinterpret_cast<uint2*>(a.values + row * a.columns + first_column + column) =
          make_uint2(rounded[r][0], rounded[r][1]);
  }
  if (a.transposed == nullptr) return;

  // Four rows of four columns, turned over: byte r of the word of column k is row r.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t low01 = __byte_perm(rounded[0][half], rounded[1][half], 0x5140);
    const uint32_t low23 = __byte_perm(rounded[2][half], rounded[3][half], 0x5140);
    const uint32_t high01 = __byte_perm(rounded[0][half], rounded[1][half], 0x7362);
    const uint32_t high23 = __byte_perm(rounded[2][half], rounded[3][half], 0x7362);
    words[column + 4 * half][word] = __byte_perm(low01, low23, 0x5410);
    words[column + 4 * half + 1][word] = __byte_perm(low01, low23, 0x7632);
    words[column + 4 * half + 2][word] = __byte_perm(high01, high23, 0x5410);
    words[column + 4 * half + 3][word] = __byte_perm(high01, high23, 0x7632);
  }
  __syncthreads();
  // A warp writes a line of 128 bytes. Rows after the last are zeros up to the pitch, which is a multiple of 16.
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int c = static_cast<int>(threadIdx.x) / kWarp; c < kTileColumns; c += kThreads / kWarp) {
    const int64_t row = first_row + lane * kRowsOfThread;
    if (first_column + c < a.columns && row < a.pitch)
      *reinterpret_cast<uint32_t*>(a.transposed + (first_column + c) * a.pitch + row) = words[c][lane];
  }
}

}  // namespace

void largest_magnitudes(Device& device, std::span<const Tensor> matrices, const Tensor& amax) {
  const cudaStream_t stream = compute_stream(device);
  FARSPAN_CUDA(cudaMemsetAsync(amax.raw(), 0, static_cast<size_t>(amax.bytes()), stream));
  MeasuredMatrices measured;
  int64_t most = 0;  // vectors of a matrix
  for (size_t i = 0; i < matrices.size(); ++i) {
    measured.of[i] = measured_matrix(matrices[i]);
    most = std::max(most, measured.of[i].rows * measured.of[i].vectors);
  }
  if (most == 0) return;
  const int64_t blocks = std::min<int64_t>(ceil_div(most, kThreads), int64_t{8} * properties(device).multiprocessors);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(matrices.size()));
  largest_magnitude<<<grid, kThreads, 0, stream>>>(measured, amax.data<float>());
  FARSPAN_CUDA_LAUNCHED();
}

void fp8_quantise(Device& device, const Tensor& x, const Tensor& amax, const Fp8Matrix& to) {
  const cudaStream_t stream = compute_stream(device);
  QuantiseArguments a;
  a.x = x.data<BFloat16>();
  a.stride = x.dim(0) <= 1 ? x.dim(1) : x.stride(0);
  a.rows = x.dim(0);
  a.columns = x.dim(1);
  a.aligned = holds_vectors(x, kElements);
  a.values = to.values.defined() ? static_cast<uint8_t*>(to.values.raw()) : nullptr;
  a.transposed = to.transposed.defined() ? static_cast<uint8_t*>(to.transposed.raw()) : nullptr;
  a.pitch = round_up(x.dim(0), kFp8Multiple);
  a.scale = to.scale.data<float>();
  const Tensor largest = amax.defined() ? amax : Tensor(device.scratch(), DType::f32, Shape{1});
  a.amax = largest.data<float>();
  if (!amax.defined()) cuda::largest_magnitudes(device, {&x, 1}, largest);
  const int64_t tiles = std::max<int64_t>(1, checked_mul(ceil_div(a.rows, kTileRows), ceil_div(a.columns, kTileColumns)));
  FARSPAN_CHECK(tiles <= INT32_MAX, "fp8_quantise: x {} is too large for one launch", x.shape().str());
  const auto launch = [&](auto kernel) {
    launch_kernel(Start::early, kernel, static_cast<unsigned>(tiles), kThreads, 0, stream, a);
  };
  const DType dtype = to.values.defined() ? to.values.dtype() : to.transposed.dtype();
  if (dtype == DType::f8e4m3)
    launch(quantise<__NV_E4M3>);
  else
    launch(quantise<__NV_E5M2>);
}

}  // namespace farspan::cuda
