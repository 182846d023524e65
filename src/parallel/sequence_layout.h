// SPDX-License-Identifier: Apache-2.0
// SequenceLayout: which rank of a context-parallel group owns which tokens of a row.
//
// The row's S tokens are padded inside to a whole number of equal chunks. Zigzag cuts 2 * cp chunks and rank r owns
// chunks r and 2 * cp - 1 - r, so that under a causal mask every rank has the same work; contiguous cuts cp chunks and
// rank r owns chunk r. Pad tokens come last in the row, see nothing, are seen by nobody and are never targets. Users
// never meet a "multiple of 2 * cp" rule. Zigzag: as in Llama 3 (2024), section 3.3.2, and ring-flash-attention.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "config/config.h"

namespace farspan {

// Token positions [begin, end) of a row.
struct Span {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t length() const { return end > begin ? end - begin : 0; }
  bool empty() const { return end <= begin; }
  bool operator==(const Span&) const = default;
};

class SequenceLayout {
 public:
  // Throws ConfigError for a layout this version does not have (balanced), and for a length or cp below 1. Zigzag with
  // cp = 1 is one chunk.
  SequenceLayout(CpLayout policy, int64_t seq_length, int cp);

  CpLayout policy() const { return policy_; }
  int cp() const { return cp_; }
  int64_t seq_length() const { return seq_length_; }        // real tokens of a row
  int64_t padded_length() const { return padded_length_; }  // all ranks' chunks together
  int64_t chunk_length() const { return chunk_length_; }
  int chunks_per_rank() const { return chunks_per_rank_; }
  int64_t local_length() const { return chunk_length_ * chunks_per_rank_; }  // s: tokens of a row on one rank

  // The chunks of a rank in ascending position; in local memory they lie one after the other in this order.
  std::span<const Span> spans(int rank) const;

  // Position in the row of local token i of a rank.
  int64_t position(int rank, int64_t i) const;

 private:
  CpLayout policy_;
  int cp_;
  int64_t seq_length_;
  int64_t padded_length_;
  int64_t chunk_length_;
  int chunks_per_rank_;
  std::vector<Span> spans_;  // rank-major
};

}  // namespace farspan
