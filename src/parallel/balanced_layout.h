// SPDX-License-Identifier: Apache-2.0
// cp_layout balanced: packed documents are dealt so that every rank has the same number of tokens and nearly the same
// number of visible (query, key) pairs, with documents whole on one rank where they can be.
//
// The largest documents, as few as will do, are cut over all ranks as a zigzag (2 cp chunks; rank r gets chunks r and
// 2 cp - 1 - r, turned by one rank from document to document), which gives every rank the same tokens and work. The
// others are placed whole, longest first, each on the rank with the least work among those with room; what then fits
// nowhere is cut to fill the holes. How many to cut is found by trying 0, 1, 2, ... until the ranks' pairs differ by at
// most kBalance; where no number will do, the best one found is taken. Longest first: Graham's LPT rule (1969).
//
// Every rank computes the same layout from the row's documents alone, in milliseconds for a million tokens.
#pragma once

#include <cstdint>
#include <span>

#include "parallel/interval_mask.h"
#include "parallel/sequence_layout.h"

namespace farspan {

// (largest - smallest) / largest of the ranks' visible pairs that is good enough.
inline constexpr double kBalance = 0.1;

// A mask of the row and the number of layers that have it: their pairs are what is balanced.
struct LayerMask {
  const IntervalMask* mask = nullptr;
  int64_t layers = 1;
};

// Who owns what in a row with these masks (at least one; all with the same documents).
RowLayout row_layout(const SequenceLayout& layout, std::span<const LayerMask> masks);
RowLayout row_layout(const SequenceLayout& layout, const IntervalMask& mask);

// Pairs whose query is on a rank.
int64_t visible_pairs_of_rank(const RowLayout& layout, const IntervalMask& mask, int rank);

}  // namespace farspan
