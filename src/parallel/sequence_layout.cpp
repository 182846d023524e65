// SPDX-License-Identifier: Apache-2.0
#include "parallel/sequence_layout.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/math.h"

namespace farspan {
namespace {

// Ascending, those that touch joined.
void sort_and_join(std::vector<Span>& spans) {
  std::erase_if(spans, [](Span span) { return span.empty(); });
  std::sort(spans.begin(), spans.end(), [](Span a, Span b) { return a.begin < b.begin; });
  size_t kept = 0;
  for (Span span : spans) {
    if (kept > 0 && spans[kept - 1].end == span.begin)
      spans[kept - 1].end = span.end;
    else
      spans[kept++] = span;
  }
  spans.resize(kept);
}

void check_partition(std::vector<Span> all) {
  sort_and_join(all);
  FARSPAN_CHECK(all.size() == 1 && all[0].begin == 0,
                "row layout: the ranks' spans do not cover the row from 0 on, each position once");
}

std::vector<std::vector<Span>> equal_chunks(CpLayout policy, int cp, int64_t chunk_length) {
  std::vector<std::vector<Span>> owned(static_cast<size_t>(cp));
  const int64_t chunks = policy == CpLayout::zigzag ? 2 * int64_t{cp} : cp;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t owner = chunk < cp ? chunk : chunks - 1 - chunk;
    owned[static_cast<size_t>(owner)].push_back({chunk * chunk_length, (chunk + 1) * chunk_length});
  }
  return owned;
}

}  // namespace

Span intersect(Span a, Span b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

RowLayout::RowLayout(std::vector<std::vector<Span>> owned) : first_{0} {
  std::vector<Span> all;
  for (std::vector<Span>& spans : owned) {
    sort_and_join(spans);
    int64_t length = 0;
    for (Span span : spans) {
      spans_.push_back({span, length});
      length += span.length();
    }
    FARSPAN_CHECK(first_.size() == 1 || length == local_length_,
                  "row layout: rank {} owns {} positions, rank 0 owns {}", first_.size() - 1, length, local_length_);
    local_length_ = length;
    first_.push_back(spans_.size());
    all.insert(all.end(), spans.begin(), spans.end());
  }
  check_partition(std::move(all));
}

std::span<const LocalSpan> RowLayout::spans(int rank) const {
  FARSPAN_CHECK(rank >= 0 && rank < cp(), "row layout: rank {} of {}", rank, cp());
  const size_t begin = first_[static_cast<size_t>(rank)];
  return std::span(spans_).subspan(begin, first_[static_cast<size_t>(rank) + 1] - begin);
}

int64_t RowLayout::position(int rank, int64_t i) const {
  FARSPAN_CHECK(i >= 0 && i < local_length_, "row layout: local token {} of {}", i, local_length_);
  const std::span<const LocalSpan> owned = spans(rank);
  const auto after =
      std::partition_point(owned.begin(), owned.end(), [&](const LocalSpan& span) { return span.local_begin <= i; });
  return (after - 1)->positions.begin + i - (after - 1)->local_begin;
}

RowLayout merge_ranks(const RowLayout& layout, int members) {
  FARSPAN_CHECK(members > 0 && layout.cp() % members == 0, "row layout: {} ranks in groups of {}", layout.cp(),
                members);
  std::vector<std::vector<Span>> owned(static_cast<size_t>(layout.cp() / members));
  for (int rank = 0; rank < layout.cp(); ++rank)
    for (const LocalSpan& span : layout.spans(rank))
      owned[static_cast<size_t>(rank / members)].push_back(span.positions);
  return RowLayout(std::move(owned));
}

SequenceLayout::SequenceLayout(CpLayout policy, int64_t seq_length, int cp, int64_t multiple)
    : policy_(policy), cp_(cp), seq_length_(seq_length) {
  if (cp < 1) throw ConfigError(fmt::format("context_parallel_size: {} found; use 1 or more", cp));
  if (seq_length < 1)
    throw ConfigError(fmt::format("seq_length: {} found; a row needs at least 1 token, for example 1024", seq_length));
  if (multiple < 1) throw ConfigError(fmt::format("tokens of a rank in multiples of {}; use 1 or more", multiple));

  // A lone rank owns the whole row whatever the policy; one chunk keeps its row in one block.
  chunks_per_rank_ = policy == CpLayout::zigzag && cp > 1 ? 2 : 1;
  const int64_t chunk_multiple = multiple / std::gcd(multiple, int64_t{chunks_per_rank_});
  const int64_t chunk_length = round_up(ceil_div(seq_length, checked_mul(chunks_per_rank_, cp)), chunk_multiple);
  local_length_ = checked_mul(chunk_length, chunks_per_rank_);
  checked_mul(local_length_, cp);
  if (policy != CpLayout::balanced || cp == 1)
    rows_ = RowLayout(equal_chunks(cp == 1 ? CpLayout::contiguous : policy, cp, chunk_length));
}

const RowLayout& SequenceLayout::every_row() const {
  FARSPAN_CHECK(same_for_all_rows(), "sequence layout: rows are dealt one by one under the balanced policy");
  return rows_;
}

}  // namespace farspan
