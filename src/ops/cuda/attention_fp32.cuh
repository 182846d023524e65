// SPDX-License-Identifier: Apache-2.0
// The pieces of the fp32 attention kernels. A block of 256 threads owns a tile of tokens (queries, or keys) of one head
// while tiles of the others pass by; all lie in shared memory. Thread (x, y), 16 of each, computes the pairs of own rows
// y, y + 16, .. with passing rows x, x + 16, .., and of the results for own rows y, y + 16, .. the columns 4 x, 4 x + 64,
// and on. Sums run over one tile first and over tiles second, which keeps the error of a sum over thousands of tokens near
// that of a short one. Pairs that are masked are left out of sums one by one.
#pragma once

#include <cmath>

#include "ops/cuda/attention_dropout.cuh"
#include "ops/cuda/attention_tile.cuh"

namespace farspan::cuda {

inline constexpr int kFp32Threads = 256;

template <int kHeadSize>
struct Fp32 {
  static constexpr int kTile = kHeadSize <= 128 ? 64 : 32;
  static constexpr int kRows = kTile / 16;  // of a thread
  static constexpr int kVectors = kHeadSize / 64;  // of four columns, of a thread

  struct Tokens {
    // A row's length in vectors is odd, so that the same vector of eight rows in turn lies in different banks.
    float4 rows[kTile][kHeadSize / 4 + 1];
  };
  struct Pairs {
    float rows[kTile][kTile + 4];
  };
  using Scores = float[kRows][kRows];
  struct Results {
    float4 of[kRows][kVectors];
  };

  __device__ static int x() { return static_cast<int>(threadIdx.x) % 16; }
  __device__ static int y() { return static_cast<int>(threadIdx.x) / 16; }

  // Tokens [first, first + kTile) of one head, those from `tokens` on as zeros.
  __device__ static void load(Tokens& tile, const HeadsView& view, int head, int first, int tokens, int head_size) {
    const float* const source = head_of<const float>(view, head);
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kHeadSize / 4; i += kFp32Threads) {
      const int row = i / (kHeadSize / 4);
      const int column = i % (kHeadSize / 4) * 4;
      float4 x{0, 0, 0, 0};
      if (first + row < tokens && column < head_size) {
        const float* const from = source + (first + row) * view.token_stride + column;
        if (view.vectors)
          x = *reinterpret_cast<const float4*>(from);
        else
          x = {from[0], column + 1 < head_size ? from[1] : 0, column + 2 < head_size ? from[2] : 0,
               column + 3 < head_size ? from[3] : 0};
      }
      tile.rows[row][column / 4] = x;
    }
  }

  // scores[r][c] = <own row y + 16 r, passing row x + 16 c>
  __device__ static void multiply(Scores& scores, const Tokens& own, const Tokens& passing) {
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kRows; ++c) scores[r][c] = 0;
#pragma unroll 4
    for (int v = 0; v < kHeadSize / 4; ++v) {
      float4 a[kRows], b[kRows];
      for (int r = 0; r < kRows; ++r) a[r] = own.rows[y() + 16 * r][v];
      for (int c = 0; c < kRows; ++c) b[c] = passing.rows[x() + 16 * c][v];
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int c = 0; c < kRows; ++c) {
          scores[r][c] = fmaf(a[r].x, b[c].x, scores[r][c]);
          scores[r][c] = fmaf(a[r].y, b[c].y, scores[r][c]);
          scores[r][c] = fmaf(a[r].z, b[c].z, scores[r][c]);
          scores[r][c] = fmaf(a[r].w, b[c].w, scores[r][c]);
        }
    }
  }

  __device__ static void store(Pairs& pairs, const Scores& values) {
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kRows; ++c) pairs.rows[y() + 16 * r][x() + 16 * c] = values[r][c];
  }

  // results[r] = results[r] * shrink[r] + sum over the passing rows c with sees(own row, c) of pairs(own row, c) passing(c)
  template <typename Sees>
  __device__ static void accumulate(Results& results, const float (&shrink)[kRows], const Pairs& pairs,
                                    const Tokens& passing, Sees&& sees) {
    float4 sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) sums[r][v] = {0, 0, 0, 0};
    for (int c = 0; c < kTile; ++c) {
      float4 b[kVectors];
      for (int v = 0; v < kVectors; ++v) b[v] = passing.rows[c][x() + 16 * v];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (!sees(y() + 16 * r, c)) continue;
        const float a = pairs.rows[y() + 16 * r][c];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          sums[r][v].x = fmaf(a, b[v].x, sums[r][v].x);
          sums[r][v].y = fmaf(a, b[v].y, sums[r][v].y);
          sums[r][v].z = fmaf(a, b[v].z, sums[r][v].z);
          sums[r][v].w = fmaf(a, b[v].w, sums[r][v].w);
        }
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) {
        float4& x = results.of[r][v];
        x = {fmaf(x.x, shrink[r], sums[r][v].x), fmaf(x.y, shrink[r], sums[r][v].y),
             fmaf(x.z, shrink[r], sums[r][v].z), fmaf(x.w, shrink[r], sums[r][v].w)};
      }
  }

  // Rows from `first` on of one head, those that `stored` says so of, times `factor`.
  template <typename Stored>
  __device__ static void store(const Results& results, const HeadsView& view, int head, int first, Stored&& stored,
                               int head_size, float factor, bool add) {
    for (int r = 0; r < kRows; ++r) {
      const int row = first + y() + 16 * r;
      if (!stored(row)) continue;
      for (int v = 0; v < kVectors; ++v) {
        const float4 x4 = results.of[r][v];
        const int column = 4 * x() + 64 * v;
        store_pair(view, head, row, column, x4.x * factor, x4.y * factor, head_size, add);
        store_pair(view, head, row, column + 2, x4.z * factor, x4.w * factor, head_size, add);
      }
    }
  }
};

// Over the 16 threads that share own rows.
__device__ inline float row_max(float x) {
  for (int distance = 8; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}
__device__ inline float row_sum(float x) {
  for (int distance = 8; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

}  // namespace farspan::cuda
