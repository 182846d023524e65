// SPDX-License-Identifier: Apache-2.0
// How much scratch (Device::scratch) the ops' bodies on a CUDA device use. Plans are made from these where there is no
// GPU too.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/math.h"

namespace farspan::cuda {

// cuBLASLt's workspace, for every product: partial sums where k is split, and its schedulers' counters. The library
// advises 32 MiB on Hopper (cuBLAS documentation, cublasSetWorkspace); twice that has room for split sums of a larger
// c.
inline constexpr int64_t kGemmScratchBytes = int64_t{64} << 20;

// Where a scratch has several parts, each begins at a multiple of this: no two share a cache line, and vectors of any
// type fit.
inline constexpr int64_t kScratchAlignment = 256;
inline int64_t scratch_part(int64_t bytes) { return round_up(bytes, kScratchAlignment); }

// fp8_quantise: the largest magnitude.
inline constexpr int64_t kFp8QuantiseScratch = kScratchAlignment;

// token_loss_sum, sum_of_squares: one fp64 sum of each of a fixed number of blocks, so that their order is the same on
// any GPU.
inline constexpr int64_t kSumBlocks = 1024;
inline int64_t partial_sums_scratch() { return scratch_part(kSumBlocks * 8); }

// embedding_backward: the tokens' rows and numbers, before and after they are sorted, and where the run of each row
// begins; the sums of pieces of runs longer than a piece (embedding_backward.cu says why two for each piece's length of
// tokens); and what the sort asks for, which is held against this bound when it runs.
inline constexpr int64_t kRunPiece = 128;  // tokens
inline int64_t embedding_sort_bytes(int64_t tokens) { return scratch_part((int64_t{1} << 20) + 2 * tokens); }
inline int64_t embedding_pieces(int64_t tokens) { return tokens > kRunPiece ? 2 * ceil_div(tokens, kRunPiece) : 0; }
inline int64_t embedding_backward_scratch(int64_t tokens, int64_t rows, int64_t columns) {
  return 4 * scratch_part(4 * tokens) + scratch_part(4 * (rows + 1)) +
         scratch_part(4 * embedding_pieces(tokens) * columns) + embedding_sort_bytes(tokens);
}

// rms_norm_backward and bias_backward: one row of fp32 partial sums from each of a number of blocks that depends on the
// rows only. 264 keeps two blocks on each of an H100's or H200's 132 multiprocessors.
inline int64_t rms_norm_backward_parts(int64_t rows) { return std::clamp<int64_t>(rows, 1, 264); }
inline int64_t rms_norm_backward_scratch(int64_t rows, int64_t columns) {
  return rms_norm_backward_parts(rows) * columns * 4;
}
inline int64_t bias_backward_parts(int64_t rows) { return std::clamp<int64_t>(rows / 32, 1, 64); }
inline int64_t bias_backward_scratch(int64_t rows, int64_t columns) { return bias_backward_parts(rows) * columns * 4; }

}  // namespace farspan::cuda
