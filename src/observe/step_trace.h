// SPDX-License-Identifier: Apache-2.0
// StepTrace: one rank's step on a time line, in Chrome's trace format ("Trace Event Format"), which Perfetto and
// chrome://tracing open. A rank is a process there; its threads are phases, compute, communication and copies.
//
// Times are of the machine's own calendar clock, so that ranks in different processes of a machine fit to the
// microsecond; between machines they fit as well as their clocks agree.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "device/device.h"

namespace farspan {

class StepTrace {
 public:
  StepTrace();

  void add(const OpCost& cost, OpTime time);
  void add(const Activity& activity, OpTime time);

  bool empty() const;
  // Calendar time of the earliest event, nanoseconds since 1970; the largest number when there is none.
  int64_t begin_nanoseconds() const;
  // The events, one a line, separated by commas; `base` is the begin of time.
  std::string events(int rank, int64_t base_nanoseconds) const;

 private:
  enum Thread { phases, compute, communication, copies, kThreads };
  static Thread thread_of(ActivityKind kind);
  struct Event {
    std::string name;
    OpTime time;
    std::string arguments;  // JSON fields
  };

  std::array<std::vector<Event>, kThreads> events_;
  int64_t calendar_minus_steady_ = 0;  // nanoseconds
};

// A whole file of every rank's events.
std::string trace_file(const std::vector<std::string>& events_by_rank);

}  // namespace farspan
