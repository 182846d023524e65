// SPDX-License-Identifier: Apache-2.0
// AdamW and gradient descent over the chunks of many parameters: one pass that reads gradient, weight and moments and
// writes weight, moments and the copy that the layers read. The formulas of ops/cpu/optimizer_step.cpp.
#include <algorithm>
#include <cmath>

#include "ops/cuda/ops.h"
#include "ops/cuda/tensor_chunks.cuh"
#include "ops/cuda/vector.cuh"

namespace farspan::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kElements = 4;       // of a vector of f32
constexpr int64_t kChunk = 16384;  // elements: 8 vectors a thread

struct Parameter {
  const float* gradient;
  float* weight;
  float* m;  // null for gradient descent
  float* v;
  void* copy;  // or null
  float decay;  // lr * weight_decay
  bool copy_is_bf16;
  bool vectors;  // all addresses allow vectors
};

struct AdamWRule {
  float scale, beta1, rest1, beta2, rest2, rate, correct2, epsilon;

  explicit AdamWRule(const AdamWStep& adamw)
      : scale(static_cast<float>(adamw.gradient_scale)),
        beta1(static_cast<float>(adamw.beta1)),
        rest1(static_cast<float>(1 - adamw.beta1)),
        beta2(static_cast<float>(adamw.beta2)),
        rest2(static_cast<float>(1 - adamw.beta2)),
        rate(static_cast<float>(adamw.lr / (1 - std::pow(adamw.beta1, static_cast<double>(adamw.step))))),
        correct2(static_cast<float>(1 / (1 - std::pow(adamw.beta2, static_cast<double>(adamw.step))))),
        epsilon(static_cast<float>(adamw.epsilon)) {}

  template <int N>
  __device__ __forceinline__ void run(const Parameter& p, int64_t i) const {
    Vector<float, N> gradients, weights, ms, vs;
    gradients.load(p.gradient + i);
    weights.load(p.weight + i);
    ms.load(p.m + i);
    vs.load(p.v + i);
    float g[N], w[N], m[N], v[N];
    gradients.get(g);
    weights.get(w);
    ms.get(m);
    vs.get(v);
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const float gradient = g[e] * scale;
      m[e] = __fmaf_rn(beta1, m[e], __fmul_rn(rest1, gradient));
      v[e] = __fmaf_rn(beta2, v[e], __fmul_rn(__fmul_rn(rest2, gradient), gradient));
      const float update = __fdiv_rn(__fmul_rn(rate, m[e]), __fadd_rn(__fsqrt_rn(__fmul_rn(v[e], correct2)), epsilon));
      w[e] = __fsub_rn(w[e], __fmaf_rn(p.decay, w[e], update));
    }
    ms.set(m);
    vs.set(v);
    ms.store(p.m + i);
    vs.store(p.v + i);
    store_weights(p, i, w);
  }

  template <int N>
  static __device__ __forceinline__ void store_weights(const Parameter& p, int64_t i, const float (&w)[N]) {
    Vector<float, N> weights;
    weights.set(w);
    weights.store(p.weight + i);
    if (p.copy == nullptr) return;
    if (p.copy_is_bf16) {
      Vector<BFloat16, N> rounded;
      rounded.set(w);
      rounded.store(static_cast<BFloat16*>(p.copy) + i);
    } else {
      weights.store(static_cast<float*>(p.copy) + i);
    }
  }
};

struct SgdRule {
  float rate;

  explicit SgdRule(const SgdStep& sgd) : rate(static_cast<float>(sgd.lr * sgd.gradient_scale)) {}

  template <int N>
  __device__ __forceinline__ void run(const Parameter& p, int64_t i) const {
    Vector<float, N> gradients, weights;
    gradients.load(p.gradient + i);
    weights.load(p.weight + i);
    float g[N], w[N];
    gradients.get(g);
    weights.get(w);
#pragma unroll
    for (int e = 0; e < N; ++e)
      w[e] = __fsub_rn(w[e], __fmaf_rn(p.decay, w[e], __fmul_rn(rate, g[e])));
    AdamWRule::store_weights(p, i, w);
  }
};

template <typename Rule>
__global__ void __launch_bounds__(kThreads) update(const __grid_constant__ TensorChunks<Parameter> parameters,
                                                   const Rule rule) {
  const auto [tensor, begin, length] = parameters.find(blockIdx.x, kChunk);
  const Parameter& p = parameters.operands[tensor];
  if (p.vectors) {
    const int64_t whole = length / kElements * kElements;
#pragma unroll 1
    for (int64_t i = threadIdx.x * kElements; i < whole; i += kThreads * kElements)
      rule.template run<kElements>(p, begin + i);
    if (threadIdx.x < length - whole) rule.template run<1>(p, begin + whole + threadIdx.x);
  } else {
    for (int64_t i = threadIdx.x; i < length; i += kThreads) rule.template run<1>(p, begin + i);
  }
}

bool allows_vectors(const Tensor& tensor) {
  return !tensor.defined() || reinterpret_cast<uintptr_t>(tensor.raw()) % (kElements * size_of(tensor.dtype())) == 0;
}

Parameter parameter_of(const AdamWTensors& t, double decay) {
  return {.gradient = t.gradient.data<float>(),
          .weight = t.weight.data<float>(),
          .m = t.m.defined() ? t.m.data<float>() : nullptr,
          .v = t.v.defined() ? t.v.data<float>() : nullptr,
          .copy = t.compute_weight.raw(),
          .decay = static_cast<float>(decay),
          .copy_is_bf16 = t.compute_weight.defined() && t.compute_weight.dtype() == DType::bf16,
          .vectors = allows_vectors(t.gradient) && allows_vectors(t.weight) && allows_vectors(t.m) &&
                     allows_vectors(t.v) && allows_vectors(t.compute_weight)};
}

template <typename Rule>
void update_all(Device& device, const Rule& rule, double lr, std::span<const AdamWTensors> tensors) {
  for_tables<Parameter>(
      tensors, kChunk, [lr](const AdamWTensors& t) { return parameter_of(t, lr * t.weight_decay); },
      [](const AdamWTensors& t) { return t.weight.numel(); },
      [&](const TensorChunks<Parameter>& table) {
        update<<<grid_size(table.chunks()), kThreads, 0, compute_stream(device)>>>(table, rule);
        FARSPAN_CUDA_LAUNCHED();
      });
}

}  // namespace

void adamw_step(Device& device, const AdamWStep& adamw, std::span<const AdamWTensors> tensors) {
  update_all(device, AdamWRule(adamw), adamw.lr, tensors);
}

void sgd_step(Device& device, const SgdStep& sgd, const Tensor& gradient, const Tensor& weight,
              const Tensor& compute_weight) {
  const AdamWTensors tensors = {gradient, weight, {}, {}, compute_weight, sgd.weight_decay};
  update_all(device, SgdRule(sgd), sgd.lr, std::span(&tensors, 1));
}

}  // namespace farspan::cuda
