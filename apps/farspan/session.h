// SPDX-License-Identifier: Apache-2.0
// How this process takes part in its job: alone, or as one of the processes that a launcher started. Of several only
// rank 0's speaks: the others' standard output goes nowhere, and a failure is printed once, last, by it.
#pragma once

#include <exception>
#include <memory>
#include <optional>

#include "base/log.h"
#include "comm/mpi/processes.h"
#include "config/launch.h"

namespace farspan {

class Session {
 public:
  const Launch& launch() const { return launch_; }
  // Joins the other processes where the launcher started several. Throws as Processes does.
  void join(const Launch& launch);
  // The processes that the ranks of a job are, or null where they are threads of this one. Throws ConfigError where
  // that is not what the configuration asks for.
  Processes* processes_for(const Config& config, int world_size);
  bool speaks() const { return !processes_ || processes_->rank() == 0; }

  // The command is done: waits for the other processes.
  void finish();
  // The exit status after a failure, whose message is printed; one of several processes ends in here.
  int fail(std::exception_ptr exception);

 private:
  void become_one_of(const Launch& launch);

  Launch launch_;
  std::unique_ptr<Processes> processes_;
  std::optional<LogRank> log_rank_;
};

}  // namespace farspan
