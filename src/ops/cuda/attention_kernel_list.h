// SPDX-License-Identifier: Apache-2.0
// The kernels behind attention_kernels.h. Each forward takes all of a block; of a backward there are two kernels, one
// that sums over keys and one that sums over queries, so that every sum has one owner and a fixed order.
#pragma once

#include "ops/cuda/attention_arguments.h"

namespace farspan::cuda {

// bf16 on mma.sync.
void attention_forward_mma(const ForwardArguments& arguments, cudaStream_t stream);
void attention_d_query_mma(const BackwardArguments& arguments, cudaStream_t stream);
void attention_d_key_value_mma(const BackwardArguments& arguments, cudaStream_t stream);

// bf16 on Hopper's wgmma; for tensors with whole vectors (HeadsView::vectors), a positive scale and no dropout.
void attention_forward_hopper(const ForwardArguments& arguments, cudaStream_t stream);
// Blocks of threads own so many queries, or keys, in the orders that order_tiles found. d_query is queued right behind
// d_key and d_value, and beside them.
inline constexpr int kBackwardTileRows = 128;
inline constexpr int kWideBackwardKeys = 64;
// Head sizes up to 128.
void attention_d_key_value_hopper(const BackwardArguments& arguments, cudaStream_t stream);
// Head sizes above; tiles of kWideBackwardKeys keys.
void attention_d_key_value_wide_hopper(const BackwardArguments& arguments, cudaStream_t stream);
void attention_d_query_hopper(const BackwardArguments& arguments, cudaStream_t stream);

// fp32 on the ordinary units.
void attention_forward_fp32(const ForwardArguments& arguments, cudaStream_t stream);
void attention_d_query_fp32(const BackwardArguments& arguments, cudaStream_t stream);
void attention_d_key_value_fp32(const BackwardArguments& arguments, cudaStream_t stream);

}  // namespace farspan::cuda
