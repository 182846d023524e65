// SPDX-License-Identifier: Apache-2.0
#include "ops/cuda/each_vector.cuh"
#include "ops/cuda/ops.h"
#include "ops/cuda/philox.cuh"
#include "ops/dropout_rule.h"
#include "ops/operand_checks.h"

namespace farspan::cuda {
namespace {

// y = x + dropped(z); not kAdds: y = dropped(z). token_index null: nothing is dropped.
template <typename X, typename Z, typename Y, bool kAdds>
struct Dropped {
  template <int N>
  struct Held {
    Vector<X, N> x;
    Vector<Z, N> z;
    uint64_t token;
  };

  const X* x;
  const Z* z;
  Y* y;
  const int64_t* token_index;
  PhiloxKeys keys;
  uint32_t threshold;
  float scale;

  template <int N>
  __device__ Held<N> load(const Place<3>& place) const {
    Held<N> held;
    if constexpr (kAdds) held.x.load(x + place.at[0]);
    held.z.load(z + place.at[1]);
    held.token = token_index == nullptr ? 0 : static_cast<uint64_t>(token_index[place.row]);
    return held;
  }

  // kept *= scale where the draw of a channel from `first` on keeps it, 0 elsewhere.
  template <int N>
  __device__ void drop(uint64_t token, int64_t first, float (&kept)[N]) const {
    uint4 draws{};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int word = N == 1 ? static_cast<int>(first & 3) : i % 4;
      if (i % 4 == 0) draws = philox(keys, token, static_cast<uint64_t>(first + i) / 4);
      const uint32_t draw = word == 0 ? draws.x : word == 1 ? draws.y : word == 2 ? draws.z : draws.w;
      kept[i] = draw < threshold ? 0.0f : kept[i] * scale;
    }
  }

  template <int N>
  __device__ void finish(const Place<3>& place, const Held<N>& held) const {
    float kept[N];
    held.z.get(kept);
    if (token_index != nullptr) drop(held.token, place.column, kept);
    if constexpr (kAdds) {
      float sum[N];
      held.x.get(sum);
#pragma unroll
      for (int i = 0; i < N; ++i) kept[i] += sum[i];
    }
    Vector<Y, N> result;
    result.set(kept);
    result.store(y + place.at[2]);
  }
};

}  // namespace

void dropout_add(Device& device, const Dropout& dropout, const Tensor& token_index, const Tensor& x, const Tensor& z,
                 const Tensor& y) {
  if (z.numel() == 0) return;
  const DropoutRule rule(dropout.probability);
  const int64_t* tokens = dropout.probability > 0 ? token_index.data<int64_t>() : nullptr;
  const Tensor& added = x.defined() ? x : z;
  with_compute_type(added.dtype(), [&](auto of_x) {
    with_compute_type(z.dtype(), [&](auto of_z) {
      with_compute_type(y.dtype(), [&](auto of_y) {
        using X = decltype(of_x);
        using Z = decltype(of_z);
        using Y = decltype(of_y);
        constexpr int N = std::min({kVectorElements<X>, kVectorElements<Z>, kVectorElements<Y>});
        const auto run = [&]<bool kAdds>() {
          const Dropped<X, Z, Y, kAdds> body{
              added.data<X>(), z.data<Z>(), y.data<Y>(), tokens, PhiloxKeys(dropout.key), rule.threshold, rule.scale};
          for_each_vector<N>(compute_stream(device), rows_of(N, {added, z, y}, Merge::keep_rows), body);
        };
        if (x.defined()) return run.template operator()<true>();
        if constexpr (std::is_same_v<X, Z>) run.template operator()<false>();
      });
    });
  });
}

}  // namespace farspan::cuda
