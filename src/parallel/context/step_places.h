// SPDX-License-Identifier: Apache-2.0
// Where the tokens that a rank sends, or receives, in one step of a KeySchedule lie in a buffer.
#pragma once

#include <vector>

#include "parallel/context/key_schedule.h"

namespace farspan {

struct PlacedSegment {
  Segment segment;
  int64_t begin = 0;  // among all tokens of the step
};

struct StepPlaces {
  std::vector<PlacedSegment> pieces;         // what lies there, by place
  std::vector<std::vector<int64_t>> begins;  // by parcel and segment of it
  int64_t tokens = 0;
};

// Every token once, as they stand in their rows, whoever owns them or wants them: what several ranks want is there for
// all of them, and neighbours in the row are one block of keys. Pieces ascend by row and position.
StepPlaces places_by_position(const std::vector<Parcel>& parcels);

// One parcel behind the other: tokens of two of them are there twice.
StepPlaces places_by_parcel(const std::vector<Parcel>& parcels);

}  // namespace farspan
