// SPDX-License-Identifier: Apache-2.0
#include "parallel/context/step_places.h"

#include <algorithm>
#include <utility>

namespace farspan {
namespace {

std::pair<int64_t, int64_t> place_in_row(const Segment& segment) { return {segment.row, segment.keys.positions.begin}; }

// Whether `next`, which begins no earlier, lies within or right behind `last`, in the row as in its owner's memory.
bool continues(const Segment& last, const Segment& next) {
  const int64_t skipped = next.keys.positions.begin - last.keys.positions.begin;
  return next.row == last.row && skipped <= last.tokens() && next.keys.local_begin == last.keys.local_begin + skipped;
}

}  // namespace

StepPlaces places_by_position(const std::vector<Parcel>& parcels) {
  std::vector<Segment> segments;
  for (const Parcel& parcel : parcels) segments.insert(segments.end(), parcel.segments.begin(), parcel.segments.end());
  std::sort(segments.begin(), segments.end(),
            [](const Segment& a, const Segment& b) { return place_in_row(a) < place_in_row(b); });
  StepPlaces places;
  for (const Segment& segment : segments) {
    if (places.pieces.empty() || !continues(places.pieces.back().segment, segment)) {
      places.pieces.push_back({segment, places.tokens});
      places.tokens += segment.tokens();
      continue;
    }
    Span& positions = places.pieces.back().segment.keys.positions;
    const int64_t more = std::max<int64_t>(0, segment.keys.positions.end - positions.end);
    positions.end += more;
    places.tokens += more;
  }
  for (const Parcel& parcel : parcels) {
    std::vector<int64_t>& begins = places.begins.emplace_back();
    for (const Segment& segment : parcel.segments) {
      const auto behind = std::upper_bound(
          places.pieces.begin(), places.pieces.end(), place_in_row(segment),
          [](const auto& place, const PlacedSegment& piece) { return place < place_in_row(piece.segment); });
      const PlacedSegment& piece = *std::prev(behind);
      begins.push_back(piece.begin + segment.keys.positions.begin - piece.segment.keys.positions.begin);
    }
  }
  return places;
}

StepPlaces places_by_parcel(const std::vector<Parcel>& parcels) {
  StepPlaces places;
  for (const Parcel& parcel : parcels) {
    std::vector<int64_t>& begins = places.begins.emplace_back();
    for (const Segment& segment : parcel.segments) {
      begins.push_back(places.tokens);
      places.pieces.push_back({segment, places.tokens});
      places.tokens += segment.tokens();
    }
  }
  return places;
}

}  // namespace farspan
