// SPDX-License-Identifier: Apache-2.0
// Dealing: everything a row has per token (tokens, labels, positions, visible intervals) reaches a rank through these
// functions, so that no array can be cut in another order than its neighbours.
//
// All take a whole row's description in row positions and write the rank's s = layout.local_length() local tokens, in
// the order of layout.spans(rank), the order of its memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "base/error.h"
#include "parallel/interval_mask.h"
#include "parallel/sequence_layout.h"

namespace farspan {

// Calls body(Span row_positions, int64_t local_begin) for each span of the rank: local tokens
// [local_begin, local_begin + length) are the row's tokens [begin, end). The end may lie past the row's real tokens.
template <typename Body>
void deal(const RowLayout& layout, int rank, Body&& body) {
  for (const LocalSpan& span : layout.spans(rank)) body(span.positions, span.local_begin);
}

// local[i] = row[position of local token i]; `padding` where the position lies past the end of `row`.
template <typename T>
void deal_values(const RowLayout& layout, int rank, std::span<const T> row, T padding, std::span<T> local) {
  const int64_t padded_length = layout.local_length() * layout.cp();
  FARSPAN_CHECK(std::ssize(row) <= padded_length && std::ssize(local) == layout.local_length(),
                "deal: row of {} tokens (at most {}) into {} local tokens (exactly {})", row.size(), padded_length,
                local.size(), layout.local_length());
  deal(layout, rank, [&](Span span, int64_t local_begin) {
    for (int64_t q = span.begin; q < span.end; ++q)
      local[static_cast<size_t>(local_begin + q - span.begin)] =
          q < std::ssize(row) ? row[static_cast<size_t>(q)] : padding;
  });
}

// Positions for rotary embedding: the position in the row, or with `restart` the position in the token's document, plus
// `first` (the position that the row's, or each document's, first token has). Tokens in no document (padding) get 0.
void deal_positions(const RowLayout& layout, int rank, std::span<const Span> documents, bool restart,
                    std::span<int64_t> positions, int64_t first = 0);

// Number of each token among all tokens of the data: row_id * seq_length + position. Padding gets its row's last.
void deal_token_index(const RowLayout& layout, int rank, int64_t row_id, int64_t seq_length, std::span<int64_t> index);

// mask.visible() of the rank's tokens, in row positions; lo = hi = 0 for padding.
void deal_mask(const RowLayout& layout, int rank, const IntervalMask& mask, std::span<int64_t> lo,
               std::span<int64_t> hi);

}  // namespace farspan
