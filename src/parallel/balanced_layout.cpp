// SPDX-License-Identifier: Apache-2.0
#include "parallel/balanced_layout.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "base/error.h"

namespace farspan {
namespace {

struct Document {
  Span positions;
  int64_t work = 0;  // visible pairs over all layers
};

// Positions in no document: they cost nothing and fill any hole.
std::vector<Span> gaps(const std::vector<Span>& documents, int64_t padded_length) {
  std::vector<Span> gaps;
  int64_t reached = 0;
  for (Span document : documents) {
    gaps.push_back({reached, document.begin});
    reached = document.end;
  }
  gaps.push_back({reached, padded_length});
  std::erase_if(gaps, [](Span gap) { return gap.empty(); });
  return gaps;
}

class Dealer {
 public:
  Dealer(const SequenceLayout& layout, std::span<const LayerMask> masks)
      : cp_(layout.cp()), local_length_(layout.local_length()), masks_(masks) {
    const std::vector<Span>& documents = masks[0].mask->documents();
    FARSPAN_CHECK(documents.empty() || documents.back().end <= layout.padded_length(),
                  "row layout: a document ends at {}, the row at {}", documents.back().end, layout.padded_length());
    for (Span positions : documents) documents_.push_back({positions, work_of(positions)});
    std::stable_sort(documents_.begin(), documents_.end(),
                     [](const Document& a, const Document& b) { return a.positions.length() > b.positions.length(); });
    gaps_ = gaps(documents, layout.padded_length());
  }

  RowLayout deal() {
    std::optional<Deal> best;
    const int64_t most = cuttable();
    for (int64_t cut = 0;; cut = std::min(most, next_try(cut))) {
      Deal deal = attempt(cut);
      if (!best || deal.imbalance() < best->imbalance()) best = std::move(deal);
      if (best->imbalance() <= kBalance || cut == most) break;
    }
    return RowLayout(std::move(best->owned));
  }

 private:
  struct Deal {
    std::vector<std::vector<Span>> owned;  // by rank
    std::vector<int64_t> room;             // tokens that a rank still lacks
    std::vector<int64_t> work;
    double imbalance() const {
      const auto [least, most] = std::minmax_element(work.begin(), work.end());
      return *most == 0 ? 0 : static_cast<double>(*most - *least) / static_cast<double>(*most);
    }
  };

  // One by one while a document is a large part of the row, in growing strides when there are many small ones.
  static int64_t next_try(int64_t cut) { return cut + std::max<int64_t>(1, cut / 4); }

  // A document with fewer tokens than chunks is not worth cutting.
  int64_t cuttable() const {
    return std::partition_point(documents_.begin(), documents_.end(),
                                [&](const Document& d) { return d.positions.length() >= 2 * int64_t{cp_}; }) -
           documents_.begin();
  }

  int64_t work_of(Span queries) const {
    int64_t work = 0;
    for (const LayerMask& mask : masks_)
      work += mask.layers * mask.mask->visible_pairs(queries, {0, std::numeric_limits<int64_t>::max()});
    return work;
  }

  // Gives the rank as much of the span as it has room for and returns the rest.
  Span place(Deal& deal, int rank, Span span) const {
    const auto r = static_cast<size_t>(rank);
    const Span taken{span.begin, span.begin + std::min(span.length(), deal.room[r])};
    if (!taken.empty()) {
      deal.owned[r].push_back(taken);
      deal.room[r] -= taken.length();
      deal.work[r] += work_of(taken);
    }
    return {taken.end, span.end};
  }

  void cut_over_all_ranks(Deal& deal, Span document, int64_t turn, std::vector<Span>& left) const {
    const int64_t chunks = 2 * int64_t{cp_};
    const int64_t length = document.length();
    auto edge = [&](int64_t chunk) {
      return document.begin + length / chunks * chunk + length % chunks * chunk / chunks;
    };
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t owner = (std::min(chunk, chunks - 1 - chunk) + turn) % cp_;
      const Span rest = place(deal, static_cast<int>(owner), {edge(chunk), edge(chunk + 1)});
      if (!rest.empty()) left.push_back(rest);
    }
  }

  // The rank with the least work among those with room for `tokens`; -1 when there is none.
  int rank_with_room(const Deal& deal, int64_t tokens) const {
    int found = -1;
    for (int rank = 0; rank < cp_; ++rank) {
      const auto r = static_cast<size_t>(rank);
      if (deal.room[r] < tokens) continue;
      if (found < 0) {
        found = rank;
        continue;
      }
      const auto f = static_cast<size_t>(found);
      if (std::pair(deal.work[r], -deal.room[r]) < std::pair(deal.work[f], -deal.room[f])) found = rank;
    }
    return found;
  }

  Deal attempt(int64_t cut) const {
    const auto ranks = static_cast<size_t>(cp_);
    Deal deal{std::vector<std::vector<Span>>(ranks), std::vector<int64_t>(ranks, local_length_),
              std::vector<int64_t>(ranks, 0)};
    std::vector<Span> left;
    for (int64_t d = 0; d < std::ssize(documents_); ++d) {
      const Document& document = documents_[static_cast<size_t>(d)];
      if (d < cut) {
        cut_over_all_ranks(deal, document.positions, d, left);
        continue;
      }
      const int rank = rank_with_room(deal, document.positions.length());
      if (rank < 0) {
        left.push_back(document.positions);
        continue;
      }
      const auto r = static_cast<size_t>(rank);
      deal.owned[r].push_back(document.positions);
      deal.room[r] -= document.positions.length();
      deal.work[r] += document.work;
    }
    left.insert(left.end(), gaps_.begin(), gaps_.end());
    for (Span span : left)
      while (!span.empty()) span = place(deal, rank_with_room(deal, 1), span);
    return deal;
  }

  int cp_;
  int64_t local_length_;
  std::span<const LayerMask> masks_;
  std::vector<Document> documents_;  // longest first
  std::vector<Span> gaps_;
};

}  // namespace

RowLayout row_layout(const SequenceLayout& layout, std::span<const LayerMask> masks) {
  FARSPAN_CHECK(!masks.empty(), "row layout: no mask");
  if (layout.same_for_all_rows()) return layout.every_row();
  for (const LayerMask& mask : masks)
    FARSPAN_CHECK(mask.mask->documents() == masks[0].mask->documents(), "row layout: masks of different documents");
  return Dealer(layout, masks).deal();
}

RowLayout row_layout(const SequenceLayout& layout, const IntervalMask& mask) {
  const LayerMask only{&mask, 1};
  return row_layout(layout, {&only, 1});
}

int64_t visible_pairs_of_rank(const RowLayout& layout, const IntervalMask& mask, int rank) {
  int64_t pairs = 0;
  for (const LocalSpan& span : layout.spans(rank))
    pairs += mask.visible_pairs(span.positions, {0, std::numeric_limits<int64_t>::max()});
  return pairs;
}

}  // namespace farspan
