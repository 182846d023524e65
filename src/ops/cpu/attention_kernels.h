// SPDX-License-Identifier: Apache-2.0
// Block attention on the CPU's vector units, chosen at run time among everything the binary was compiled for.
//
// A key/value head's work is seen as rows: row r is query r / G of the head's r % G th query head (G = A / K heads
// share the key/value head). Rows of one query stand together because they see the same keys.
//
// Forward: a task is a tile of rows. Its queries are stored transposed, so that a vector holds one channel of several
// rows; the keys pass by in tiles. Scores, maxima, sums and the output are then all computed lane by lane, a row never
// leaves its lane, and what one row holds cannot reach another.
//
// Backward: a task is a chunk of keys. Its keys and values are stored transposed, the rows pass by in tiles, and d_key
// and d_value stay in the task's scratch until the end. d_query of a row tile is added by the chunks in ascending
// order, each waiting for the one before it, so the sums do not depend on which thread runs what.
//
// Everything is fp32 inside; bf16 is widened as it is packed. Sums run over one tile first and over tiles second, which
// keeps the error of a sum over thousands of keys near that of a short one.
//
// Scratch: kept by the calling thread for each of its device's threads, at most kMaxScratchBytes each.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ops/attention.h"

namespace farspan::cpu {

inline constexpr int64_t kMaxKernelHeadSize = 256;
inline constexpr int64_t kMaxScratchBytes = int64_t{5} << 18;  // 1.25 MiB; head size 64 takes 0.4

// The instruction sets compiled in that this machine has, best first: "AVX2", "SSE4", ...
std::vector<std::string> attention_kernel_targets();

// Uses one of them instead of the best; empty: the best again. For tests and benchmarks, while no kernel runs. Throws
// InternalError for a name that is not in the list.
void attention_kernel_select(std::string_view target);

// Why the kernels cannot take a block; empty when they can.
std::string attention_kernel_declines(const AttentionBlock& block);

// As attention_block_forward.
void attention_kernel_forward(const Device& device, const AttentionBlock& block, const Tensor& out, const Tensor& lse);

// As attention_block_backward.
void attention_kernel_backward(const Device& device, const AttentionBlock& block, const Tensor& d_out,
                               const Tensor& lse, const Tensor& delta, const Tensor& d_query, const Tensor& d_key,
                               const Tensor& d_value);

}  // namespace farspan::cpu
