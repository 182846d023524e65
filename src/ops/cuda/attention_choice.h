// SPDX-License-Identifier: Apache-2.0
// Which plain and causal blocks the own attention kernels take though cuDNN could: those on which they are faster.
// Forward on an H200, TFLOP/s of cuDNN 9.14 and of the own kernels, sustained; 256, but for 131072 tokens, of 0.1 s:
//
//   heads of   causal, tokens                                   plain      added to an fp32 state: causal       plain
//              8192      16384     32768     131072             16384      8192      32768     131072          16384
//   64         451, 430  489, 467  498, 491  501, 509           514, 498   416, 416  486, 489  498, 507     497, 494
//   128        539, 536  582, 581  589, 603  599, 621           618, 605   487, 514  576, 596  595, 619     588, 599
//   256        548, 565  622, 641            -  , 676           704, 678   490, 544            -  , 674     675, 668
//
// A causal block of 8192 queries that see as many keys before: 128: 574, 582.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace farspan::cuda {

// The own kernels are compiled for heads of 64, 128 and 256 and compute others as the next of these. Whether a head is
// nearly as wide, so that their rates hold.
constexpr bool fills(int64_t head_size, int64_t compiled) {
  return head_size <= compiled && head_size > compiled / 8 * 7;
}

struct ForwardChoice {
  int64_t head_size = 0;
  int64_t queries = 0;
  bool causal = false;
  bool square = false;    // as many keys as queries
  bool straight = false;  // results are written once, in bf16; else added to an fp32 state
};

// What is left to them, in words.
constexpr std::optional<std::string_view> left_to_own_kernels(const ForwardChoice& c) {
  constexpr int64_t kLong = 16384, kVeryLong = 65536;
  if (fills(c.head_size, 64) && c.causal && c.queries > kVeryLong) return "very long causal results";
  if (fills(c.head_size, 128) && !c.straight) return "results that pass through an fp32 state";
  if (fills(c.head_size, 128) && c.causal && (c.queries > kLong || !c.square)) return "long causal results";
  if (fills(c.head_size, 256) && c.causal) return "causal results of wide heads";
  return {};
}

// At 16384 tokens of heads of 256: 476 TFLOP/s and cuDNN's 396 causal, 459 and 365 plain.
constexpr bool leaves_gradients_to_own_kernels(int64_t head_size) { return fills(head_size, 256); }

}  // namespace farspan::cuda
