// SPDX-License-Identifier: Apache-2.0
// SIGINT and SIGTERM ask the job to stop after the step in hand and save. A second one ends it at once.
#pragma once

#include "comm/communicator.h"

namespace farspan {

// Catches the two signals for as long as it lives.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  // The signal's number, or 0. The exit status is then 128 + number.
  static int received();
  // That of any rank, the highest: ranks in other processes have signals of their own. Collective.
  static int received_by_any(Communicator& world);
};

}  // namespace farspan
