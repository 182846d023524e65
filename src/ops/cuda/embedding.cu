// SPDX-License-Identifier: Apache-2.0
// Rows of the table picked by the tokens.
#include <algorithm>

#include "base/math.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/vector.cuh"

namespace farspan::cuda {
namespace {

constexpr int kThreads = 256;

struct Lookup {
  const int32_t* tokens;
  int64_t count, columns;
  int64_t first_id, rows;  // of the part
  int64_t weight_stride, y_stride;
};

// A group of blockDim.x threads per token; a token of another rank is a row of zeros.
template <typename From, typename To, int N>
__global__ void __launch_bounds__(kThreads) pick_rows(const Lookup lookup, const From* weight, To* y) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; t < lookup.count; t += step) {
    const int64_t row = lookup.tokens[t] - lookup.first_id;
    const bool here = row >= 0 && row < lookup.rows;
    const From* const from = weight + row * lookup.weight_stride;
    To* const to = y + t * lookup.y_stride;
    for (int64_t i = threadIdx.x * N; i < lookup.columns; i += blockDim.x * N) {
      Vector<From, N> values;
      values.clear();
      if (here) values.load(from + i);
      if constexpr (std::is_same_v<From, To>) {
        values.store(to + i);
      } else {
        float wide[N];
        values.get(wide);
        Vector<To, N> result;
        result.set(wide);
        result.store(to + i);
      }
    }
  }
}

template <typename From, typename To, int N>
void launch(Device& device, const Lookup& lookup, const Tensor& weight, const Tensor& y) {
  const int64_t vectors = ceil_div(lookup.columns, N);
  // Enough threads for a row, in whole warps; what is left of a block takes other rows.
  const int across = static_cast<int>(std::min<int64_t>(kThreads, round_up(vectors, kWarp)));
  const dim3 block(static_cast<unsigned>(across), static_cast<unsigned>(kThreads / across));
  pick_rows<From, To, N><<<grid_size(ceil_div(lookup.count, block.y)), block, 0, compute_stream(device)>>>(
      lookup, weight.data<From>(), y.data<To>());
  FARSPAN_CUDA_LAUNCHED();
}

template <typename From, typename To>
void pick(Device& device, const Lookup& lookup, const Tensor& weight, const Tensor& y) {
  constexpr int N = std::max(kVectorElements<From>, kVectorElements<To>);
  if (holds_vectors(weight, N) && holds_vectors(y, N))
    launch<From, To, N>(device, lookup, weight, y);
  else
    launch<From, To, 1>(device, lookup, weight, y);
}

}  // namespace

void embedding_forward(Device& device, const Tensor& tokens, const Tensor& weight, const VocabularyPart& part,
                       const Tensor& y) {
  if (y.numel() == 0) return;
  const Lookup lookup = {.tokens = tokens.data<int32_t>(),
                         .count = y.dim(0),
                         .columns = y.dim(1),
                         .first_id = part.first_id,
                         .rows = weight.dim(0),
                         .weight_stride = weight.stride(0),
                         .y_stride = y.stride(0)};
  if (weight.dtype() == DType::f32)
    pick<float, float>(device, lookup, weight, y);
  else if (y.dtype() == DType::f32)
    pick<BFloat16, float>(device, lookup, weight, y);
  else
    pick<BFloat16, BFloat16>(device, lookup, weight, y);
}

}  // namespace farspan::cuda
