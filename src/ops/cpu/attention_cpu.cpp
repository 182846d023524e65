// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention_cpu.h"

#include <algorithm>
#include <limits>

#include "device/parallel_for.h"

namespace farspan::cpu {
namespace {

// Fewer elements than this a thread cost more to hand out than to compute.
constexpr int64_t kElementsPerThread = 16384;

// In fp64: d_scores are differences from delta, so an error here would touch every one of them.
template <typename Out, typename Grad>
float row_product(const Out* out, const Grad* d_out, int64_t head_size) {
  double sum = 0;
  for (int64_t d = 0; d < head_size; ++d) sum += static_cast<double>(to_float(out[d])) * to_float(d_out[d]);
  return static_cast<float>(sum);
}

template <typename Out, typename Grad>
void delta_rows(const Device& device, const Tensor& out, const Tensor& d_out, const Tensor& delta) {
  const Out* const o = out.data<Out>();
  const Grad* const g = d_out.data<Grad>();
  float* const result = delta.data<float>();
  const int64_t heads = out.dim(1);
  const int64_t head_size = out.dim(2);
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, heads * head_size));
  parallel_for(device, out.dim(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t a = 0; a < heads; ++a)
        result[a * delta.stride(0) + i] = row_product(o + i * out.stride(0) + a * out.stride(1),
                                                      g + i * d_out.stride(0) + a * d_out.stride(1), head_size);
  });
}

}  // namespace

void zero_heads(const Device& device, const Tensor& x) {
  float* const data = x.data<float>();
  const int64_t heads = x.dim(1);
  const int64_t head_size = x.dim(2);
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, heads * head_size));
  parallel_for(device, x.dim(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t a = 0; a < heads; ++a) std::fill_n(data + i * x.stride(0) + a * x.stride(1), head_size, 0.0f);
  });
}

void attention_state_init(const Device& device, const Tensor& out, const Tensor& lse) {
  zero_heads(device, out);
  float* const l = lse.data<float>();
  parallel_for(device, lse.dim(0), std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, lse.dim(1))),
               [&](int64_t begin, int64_t end) {
                 for (int64_t a = begin; a < end; ++a)
                   std::fill_n(l + a * lse.stride(0), lse.dim(1), -std::numeric_limits<float>::infinity());
               });
}

void attention_delta(const Device& device, const Tensor& out, const Tensor& d_out, const Tensor& delta) {
  const bool out_f32 = out.dtype() == DType::f32;
  const bool d_out_f32 = d_out.dtype() == DType::f32;
  if (out_f32 && d_out_f32) return delta_rows<float, float>(device, out, d_out, delta);
  if (out_f32) return delta_rows<float, BFloat16>(device, out, d_out, delta);
  if (d_out_f32) return delta_rows<BFloat16, float>(device, out, d_out, delta);
  delta_rows<BFloat16, BFloat16>(device, out, d_out, delta);
}

}  // namespace farspan::cpu
