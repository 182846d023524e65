// SPDX-License-Identifier: Apache-2.0
#include "parallel/sequence_layout.h"

#include "base/error.h"
#include "base/math.h"

namespace farspan {

SequenceLayout::SequenceLayout(CpLayout policy, int64_t seq_length, int cp)
    : policy_(policy), cp_(cp), seq_length_(seq_length) {
  if (policy == CpLayout::balanced)
    throw ConfigError("cp_layout: balanced is not available in this version; use zigzag or contiguous");
  if (cp < 1) throw ConfigError(fmt::format("context_parallel_size: {} found; use 1 or more", cp));
  if (seq_length < 1)
    throw ConfigError(fmt::format("seq_length: {} found; a row needs at least 1 token, for example 1024", seq_length));

  // A lone rank owns the whole row either way; one chunk keeps its row in one block.
  chunks_per_rank_ = policy == CpLayout::zigzag && cp > 1 ? 2 : 1;
  const int64_t chunks = static_cast<int64_t>(chunks_per_rank_) * cp;
  chunk_length_ = ceil_div(seq_length, chunks);
  padded_length_ = checked_mul(chunk_length_, chunks);

  auto chunk = [this](int64_t index) { return Span{index * chunk_length_, (index + 1) * chunk_length_}; };
  for (int64_t rank = 0; rank < cp; ++rank) {
    spans_.push_back(chunk(rank));
    if (chunks_per_rank_ == 2) spans_.push_back(chunk(chunks - 1 - rank));
  }
}

std::span<const Span> SequenceLayout::spans(int rank) const {
  FARSPAN_CHECK(rank >= 0 && rank < cp_, "sequence layout: rank {} of {}", rank, cp_);
  return std::span(spans_).subspan(static_cast<size_t>(rank) * chunks_per_rank_, static_cast<size_t>(chunks_per_rank_));
}

int64_t SequenceLayout::position(int rank, int64_t i) const {
  FARSPAN_CHECK(i >= 0 && i < local_length(), "sequence layout: local token {} of {}", i, local_length());
  return spans(rank)[static_cast<size_t>(i / chunk_length_)].begin + i % chunk_length_;
}

}  // namespace farspan
