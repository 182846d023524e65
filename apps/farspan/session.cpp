// SPDX-License-Identifier: Apache-2.0
#include "session.h"

#include <cstdio>

#include "comm/failure.h"

namespace farspan {

void Session::join(const Launch& launch) {
  launch_ = launch;
  if (launch.processes > 1) become_one_of(launch);
}

void Session::become_one_of(const Launch& launch) {
  processes_ = std::make_unique<Processes>(launch.claim, launch.processes);
  if (processes_->rank() == 0) return;
  log_rank_.emplace(processes_->rank());
  if (std::freopen("/dev/null", "w", stdout) == nullptr) throw DataError("/dev/null cannot be opened");
}

Processes* Session::processes_for(const Config& config, int world_size) {
  if (!ranks_are_processes(config.communication, launch_, world_size)) return nullptr;
  if (!processes_) become_one_of(launch_);
  return processes_.get();
}

void Session::finish() {
  if (processes_) processes_->finish();
  processes_.reset();
}

int Session::fail(std::exception_ptr exception) {
  RankFailure failure = failure_of(processes_ ? processes_->rank() : 0, std::move(exception));
  if (processes_) processes_->leave(std::move(failure));
  // After everything the command itself printed.
  std::fflush(stdout);
  std::fprintf(stderr, "farspan: error: %s\n", one_line(failure.message).c_str());
  return static_cast<int>(failure.kind);
}

}  // namespace farspan
