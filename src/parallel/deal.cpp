// SPDX-License-Identifier: Apache-2.0
#include "parallel/deal.h"

namespace farspan {

void deal_positions(const RowLayout& layout, int rank, std::span<const Span> documents, bool restart,
                    std::span<int64_t> positions, int64_t first) {
  FARSPAN_CHECK(std::ssize(positions) == layout.local_length(), "deal: positions of {} tokens into {}",
                layout.local_length(), positions.size());
  std::fill(positions.begin(), positions.end(), 0);
  deal(layout, rank, [&](Span span, int64_t local_begin) {
    auto document =
        std::partition_point(documents.begin(), documents.end(), [&](Span d) { return d.end <= span.begin; });
    for (; document != documents.end() && document->begin < span.end; ++document) {
      const int64_t origin = restart ? document->begin : 0;
      const int64_t end = std::min(span.end, document->end);
      for (int64_t q = std::max(span.begin, document->begin); q < end; ++q)
        positions[static_cast<size_t>(local_begin + q - span.begin)] = first + q - origin;
    }
  });
}

void deal_token_index(const RowLayout& layout, int rank, int64_t row_id, int64_t seq_length, std::span<int64_t> index) {
  FARSPAN_CHECK(std::ssize(index) == layout.local_length(), "deal: indices of {} tokens into {}", layout.local_length(),
                index.size());
  deal(layout, rank, [&](Span span, int64_t local_begin) {
    for (int64_t q = span.begin; q < span.end; ++q)
      index[static_cast<size_t>(local_begin + q - span.begin)] = row_id * seq_length + std::min(q, seq_length - 1);
  });
}

void deal_mask(const RowLayout& layout, int rank, const IntervalMask& mask, std::span<int64_t> lo,
               std::span<int64_t> hi) {
  FARSPAN_CHECK(std::ssize(lo) == layout.local_length() && std::ssize(hi) == layout.local_length(),
                "deal: intervals of {} tokens into lo of {} and hi of {}", layout.local_length(), lo.size(), hi.size());
  deal(layout, rank, [&](Span span, int64_t local_begin) {
    const auto begin = static_cast<size_t>(local_begin);
    const auto count = static_cast<size_t>(span.length());
    mask.fill(span, lo.subspan(begin, count), hi.subspan(begin, count));
  });
}

}  // namespace farspan
