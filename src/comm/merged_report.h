// SPDX-License-Identifier: Apache-2.0
// One text out of all ranks' recorders: which calls are open, on which ranks, which ranks have not made them, and what
// every rank did last.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/recorder.h"

namespace farspan {

// What one rank's recorder held at one moment.
struct RankDump {
  int rank = 0;
  std::string position;
  bool ended = false;
  std::string whereabouts;               // Recorder::whereabouts
  std::vector<OperationRecord> records;  // oldest first
};

RankDump dump_of(int rank, const Recorder& recorder, bool ended);

// Lines that end in line breaks. First "all_gather 'x' of 8 bytes, call 7 of cp group [0, 1]: open on ranks [0], not
// called by ranks [1]" for every open call, then every rank with its latest `records` operations.
std::string merged_report(const std::vector<RankDump>& dumps, int64_t records);

}  // namespace farspan
