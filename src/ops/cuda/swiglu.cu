// SPDX-License-Identifier: Apache-2.0
#include "ops/cuda/amax.cuh"
#include "ops/cuda/each_vector.cuh"
#include "ops/cuda/ops.h"
#include "ops/operand_checks.h"

namespace farspan::cuda {
namespace {

// 1 / (1 + exp(-x)). For bf16 operands by the special-function unit: its error, a few parts in 10^7 for gates that
// matter, disappears in the rounding of the result.
template <typename T>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (std::is_same_v<T, float>)
    return 1.0f / (1.0f + expf(-x));
  else
    return __fdividef(1.0f, 1.0f + __expf(-x));
}

// The halves of gate_up and the output as views of one shape.
struct Halves {
  Tensor gate;
  Tensor up;
  explicit Halves(const Tensor& both)
      : gate(both.slice(1, 0, both.dim(1) / 2)), up(both.slice(1, both.dim(1) / 2, both.dim(1))) {}
};

template <typename T>
struct Forward {
  template <int N>
  struct Held {
    Vector<T, N> gate, up;
  };
  struct Found {
    LargestMagnitude<T> y[1];
  };

  const T* gate;
  const T* up;
  T* y;
  float* amax;

  template <int N>
  __device__ Held<N> load(const Place<3>& place) const {
    Held<N> held;
    held.gate.load(gate + place.at[0]);
    held.up.load(up + place.at[1]);
    return held;
  }
  template <int N>
  __device__ void finish(const Place<3>& place, const Held<N>& held, Found& found) const {
    float g[N], u[N];
    held.gate.get(g);
    held.up.get(u);
#pragma unroll
    for (int i = 0; i < N; ++i) u[i] *= g[i] * sigmoid<T>(g[i]);
    Vector<T, N> result;
    result.set(u);
    result.store(y + place.at[2]);
    found.y[0].add(result);
  }
  __device__ void leave(const Found& found) const { raise_amax(found.y, {amax}); }
};

// kActivation: y is written too.
template <typename T, bool kActivation>
struct Backward {
  template <int N>
  struct Held {
    Vector<T, N> gate, up, d_y;
  };
  struct Found {
    LargestMagnitude<T> d_gate_up_and_y[2];
  };

  const T* gate;
  const T* up;
  const T* d_y;
  T* d_gate;
  T* d_up;
  T* y;
  float* d_amax;
  float* amax;

  template <int N>
  __device__ Held<N> load(const Place<6>& place) const {
    Held<N> held;
    held.gate.load(gate + place.at[0]);
    held.up.load(up + place.at[1]);
    held.d_y.load(d_y + place.at[2]);
    return held;
  }
  template <int N>
  __device__ void finish(const Place<6>& place, const Held<N>& held, Found& found) const {
    float g[N], u[N], d[N], activation[N];
    held.gate.get(g);
    held.up.get(u);
    held.d_y.get(d);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float s = sigmoid<T>(g[i]);
      const float silu = g[i] * s;
      activation[i] = silu * u[i];
      g[i] = d[i] * u[i] * (s * (g[i] * (1.0f - s) + 1.0f));
      u[i] = d[i] * silu;
    }
    Vector<T, N> result;
    result.set(g);
    result.store(d_gate + place.at[3]);
    found.d_gate_up_and_y[0].add(result);
    result.set(u);
    result.store(d_up + place.at[4]);
    found.d_gate_up_and_y[0].add(result);
    if constexpr (kActivation) {
      result.set(activation);
      result.store(y + place.at[5]);
      found.d_gate_up_and_y[1].add(result);
    }
  }
  __device__ void leave(const Found& found) const { raise_amax(found.d_gate_up_and_y, {d_amax, amax}); }
};

template <typename T, bool kActivation>
void run_backward(cudaStream_t stream, const Halves& from, const Tensor& d_y, const Halves& to, const Tensor& y,
                  const Tensor& d_amax, const Tensor& amax) {
  constexpr int N = kVectorElements<T>;
  const Backward<T, kActivation> body{from.gate.data<T>(), from.up.data<T>(), d_y.data<T>(),      to.gate.data<T>(),
                                      to.up.data<T>(),     y.data<T>(),       address_of(d_amax), address_of(amax)};
  for_each_vector<N>(stream, rows_of(N, {from.gate, from.up, d_y, to.gate, to.up, y}), body);
}

}  // namespace

void swiglu_forward(Device& device, const Tensor& gate_up, const Tensor& y, const Tensor& amax) {
  clear_amax(compute_stream(device), amax);
  if (y.numel() == 0) return;
  const Halves from(gate_up);
  with_compute_type(y.dtype(), [&](auto element) {
    using T = decltype(element);
    constexpr int N = kVectorElements<T>;
    for_each_vector<N>(compute_stream(device), rows_of(N, {from.gate, from.up, y}),
                       Forward<T>{from.gate.data<T>(), from.up.data<T>(), y.data<T>(), address_of(amax)});
  });
}

void swiglu_backward(Device& device, const Tensor& gate_up, const Tensor& d_y, const Tensor& d_gate_up,
                     const Tensor& y, const Tensor& d_amax, const Tensor& amax) {
  clear_amax(compute_stream(device), d_amax);
  clear_amax(compute_stream(device), amax);
  if (d_y.numel() == 0) return;
  const Halves from(gate_up), to(d_gate_up);
  with_compute_type(d_y.dtype(), [&](auto element) {
    using T = decltype(element);
    if (y.defined())
      run_backward<T, true>(compute_stream(device), from, d_y, to, y, d_amax, amax);
    else
      run_backward<T, false>(compute_stream(device), from, d_y, to, d_y, d_amax, amax);
  });
}

}  // namespace farspan::cuda
