// SPDX-License-Identifier: Apache-2.0
#include "parallel/context/key_schedule.h"

namespace farspan {

KeyNeeds::KeyNeeds(const DealtRows& rows, int ranks) : rows_(rows) {
  wanted_.reserve(static_cast<size_t>(ranks * rows.count()));
  for (int reader = 0; reader < ranks; ++reader)
    for (size_t row = 0; row < static_cast<size_t>(rows.count()); ++row) {
      std::vector<Span>& wanted = wanted_.emplace_back();
      for (const LocalSpan& queries : rows.layouts[row].spans(reader)) {
        const Span seen = rows.masks[row].visible_range(queries.positions);
        if (seen.empty()) continue;
        if (!wanted.empty() && seen.begin <= wanted.back().end)
          wanted.back().end = seen.end;  // ranges of ascending queries ascend
        else
          wanted.push_back(seen);
      }
    }
}

// Calls body(segment) for what the reader wants and the owner has, both of which ascend.
template <typename Body>
void KeyNeeds::for_each(int reader, int owner, Body&& body) const {
  for (int64_t row = 0; row < rows_.count(); ++row) {
    const std::vector<Span>& wanted = wanted_[static_cast<size_t>(reader * rows_.count() + row)];
    const std::span<const LocalSpan> owned = rows_.layouts[static_cast<size_t>(row)].spans(owner);
    size_t w = 0, o = 0;
    while (w < wanted.size() && o < owned.size()) {
      const Span both = intersect(wanted[w], owned[o].positions);
      if (!both.empty()) body(Segment{row, {both, owned[o].local_begin + both.begin - owned[o].positions.begin}});
      if (wanted[w].end < owned[o].positions.end)
        ++w;
      else
        ++o;
    }
  }
}

std::vector<Segment> KeyNeeds::segments(int reader, int owner) const {
  std::vector<Segment> segments;
  for_each(reader, owner, [&](const Segment& segment) { segments.push_back(segment); });
  return segments;
}

int64_t KeyNeeds::tokens(int reader, int owner) const {
  int64_t tokens = 0;
  for_each(reader, owner, [&](const Segment& segment) { tokens += segment.tokens(); });
  return tokens;
}

}  // namespace farspan
