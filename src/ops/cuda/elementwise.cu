// SPDX-License-Identifier: Apache-2.0
#include "ops/cuda/each_vector.cuh"
#include "ops/cuda/ops.h"
#include "ops/operand_checks.h"

namespace farspan::cuda {
namespace {

template <typename A, typename B, typename Y>
struct Add {
  template <int N>
  struct Held {
    Vector<A, N> a;
    Vector<B, N> b;
  };

  const A* a;
  const B* b;
  Y* y;

  template <int N>
  __device__ Held<N> load(const Place<3>& place) const {
    Held<N> held;
    held.a.load(a + place.at[0]);
    held.b.load(b + place.at[1]);
    return held;
  }
  template <int N>
  __device__ void finish(const Place<3>& place, const Held<N>& held) const {
    float sum[N], other[N];
    held.a.get(sum);
    held.b.get(other);
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] += other[i];
    Vector<Y, N> result;
    result.set(sum);
    result.store(y + place.at[2]);
  }
};

// A bf16 NaN as to_bfloat16 makes it, which the rounding instruction does not.
__device__ uint16_t bfloat16_of_nan(float x) { return static_cast<uint16_t>(__float_as_uint(x) >> 16 | 0x40u); }

struct Round {
  template <int N>
  using Held = Vector<float, N>;

  const float* x;
  BFloat16* y;

  template <int N>
  __device__ Held<N> load(const Place<2>& place) const {
    Held<N> held;
    held.load(x + place.at[0]);
    return held;
  }
  template <int N>
  __device__ void finish(const Place<2>& place, const Held<N>& held) const {
    float values[N];
    held.get(values);
    Vector<BFloat16, N> result;
    result.set(values);
    bool nan = false;
#pragma unroll
    for (int i = 0; i < N; ++i) nan = nan || isnan(values[i]);
    result.store(y + place.at[1]);
    if (!nan) return;
    for (int i = 0; i < N; ++i)
      if (isnan(values[i])) y[place.at[1] + i].bits = bfloat16_of_nan(values[i]);
  }
};

struct Widen {
  template <int N>
  using Held = Vector<BFloat16, N>;

  const BFloat16* x;
  float* y;

  template <int N>
  __device__ Held<N> load(const Place<2>& place) const {
    Held<N> held;
    held.load(x + place.at[0]);
    return held;
  }
  template <int N>
  __device__ void finish(const Place<2>& place, const Held<N>& held) const {
    float values[N];
    held.get(values);
    Vector<float, N> result;
    result.set(values);
    result.store(y + place.at[1]);
  }
};

// E: any type of the element's size.
template <typename E>
struct Copy {
  template <int N>
  using Held = Vector<E, N>;

  const E* x;
  E* y;

  template <int N>
  __device__ Held<N> load(const Place<2>& place) const {
    Held<N> held;
    held.load(x + place.at[0]);
    return held;
  }
  template <int N>
  __device__ void finish(const Place<2>& place, const Held<N>& held) const {
    held.store(y + place.at[1]);
  }
};

template <typename E>
struct Fill {
  template <int N>
  struct Held {};

  E* x;
  E value;

  template <int N>
  __device__ Held<N> load(const Place<1>&) const {
    return {};
  }
  template <int N>
  __device__ void finish(const Place<1>& place, const Held<N>&) const {
    Vector<E, N> vector;
#pragma unroll
    for (int i = 0; i < N; ++i) reinterpret_cast<E*>(vector.words)[i] = value;
    vector.store(x + place.at[0]);
  }
};

struct Scale {
  template <int N>
  using Held = Vector<float, N>;

  float* x;
  float factor;

  template <int N>
  __device__ Held<N> load(const Place<1>& place) const {
    Held<N> held;
    held.load(x + place.at[0]);
    return held;
  }
  template <int N>
  __device__ void finish(const Place<1>& place, const Held<N>& held) const {
    float values[N];
    held.get(values);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] *= factor;
    Vector<float, N> result;
    result.set(values);
    result.store(x + place.at[0]);
  }
};

template <typename E>
void copy(cudaStream_t stream, const Tensor& x, const Tensor& y) {
  constexpr int N = kVectorElements<E>;
  for_each_vector<N>(stream, rows_of(N, {x, y}), Copy<E>{static_cast<const E*>(x.raw()), static_cast<E*>(y.raw())});
}

template <typename E>
void fill_with(cudaStream_t stream, const Tensor& x, E value) {
  constexpr int N = kVectorElements<E>;
  for_each_vector<N>(stream, rows_of(N, {x}), Fill<E>{static_cast<E*>(x.raw()), value});
}

void copy_elements(cudaStream_t stream, const Tensor& x, const Tensor& y) {
  if (x.contiguous() && y.contiguous()) {
    FARSPAN_CUDA(cudaMemcpyAsync(y.raw(), x.raw(), static_cast<size_t>(x.bytes()), cudaMemcpyDeviceToDevice, stream));
    return;
  }
  switch (size_of(x.dtype())) {
    case 1:
      return copy<uint8_t>(stream, x, y);
    case 2:
      return copy<uint16_t>(stream, x, y);
    case 4:
      return copy<uint32_t>(stream, x, y);
    default:
      return copy<uint64_t>(stream, x, y);
  }
}

}  // namespace

void add(Device& device, const Tensor& a, const Tensor& b, const Tensor& y) {
  if (y.numel() == 0) return;
  const cudaStream_t stream = compute_stream(device);
  with_compute_type(a.dtype(), [&](auto of_a) {
    with_compute_type(b.dtype(), [&](auto of_b) {
      with_compute_type(y.dtype(), [&](auto of_y) {
        using A = decltype(of_a);
        using B = decltype(of_b);
        using Y = decltype(of_y);
        constexpr int N = std::min({kVectorElements<A>, kVectorElements<B>, kVectorElements<Y>});
        for_each_vector<N>(stream, rows_of(N, {a, b, y}), Add<A, B, Y>{a.data<A>(), b.data<B>(), y.data<Y>()});
      });
    });
  });
}

void cast(Device& device, const Tensor& x, const Tensor& y) {
  if (x.numel() == 0) return;
  const cudaStream_t stream = compute_stream(device);
  if (x.dtype() == y.dtype()) return copy_elements(stream, x, y);
  constexpr int N = kVectorElements<float>;
  if (y.dtype() == DType::bf16)
    for_each_vector<N>(stream, rows_of(N, {x, y}), Round{x.data<float>(), y.data<BFloat16>()});
  else
    for_each_vector<N>(stream, rows_of(N, {x, y}), Widen{x.data<BFloat16>(), y.data<float>()});
}

void fill(Device& device, const Tensor& x, double value) {
  if (x.numel() == 0) return;
  const cudaStream_t stream = compute_stream(device);
  switch (x.dtype()) {
    case DType::bf16:
      return fill_with(stream, x, to_bfloat16(static_cast<float>(value)).bits);
    case DType::i32:
      return fill_with(stream, x, static_cast<int32_t>(value));
    case DType::i64:
      return fill_with(stream, x, static_cast<int64_t>(value));
    default:
      return fill_with(stream, x, static_cast<float>(value));
  }
}

void scale(Device& device, const Tensor& x, double factor) {
  if (x.numel() == 0) return;
  constexpr int N = kVectorElements<float>;
  for_each_vector<N>(compute_stream(device), rows_of(N, {x}), Scale{x.data<float>(), static_cast<float>(factor)});
}

}  // namespace farspan::cuda
