// SPDX-License-Identifier: Apache-2.0
// StepObserver: what one rank of a training run watches of its steps: a profile of them all, a trace of one, and ranges
// for NVIDIA's profilers. It is the device's observer from begin_step to end_step and no longer. Of communicators whose
// messages lie in host memory the caller makes it the observer for as long as it likes.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "comm/communicator.h"
#include "device/device.h"
#include "observe/step_profile.h"
#include "observe/step_trace.h"

namespace farspan {

// What to watch.
struct Observation {
  bool profile = false;
  bool trace = false;
  Ceilings ceilings;
  bool any() const { return profile || trace; }
};

class StepObserver final : public OpObserver, public CallObserver {
 public:
  // The run's first and last step. The first is left out of the profile, since caches fill in it, and the third one is
  // traced, unless the run is shorter.
  StepObserver(const Observation& what, Device& device, int64_t first_step, int64_t last_step);
  ~StepObserver() override;
  StepObserver(const StepObserver&) = delete;
  StepObserver& operator=(const StepObserver&) = delete;

  void begin_step(int64_t step);
  // On a GPU waits until the step has run.
  void end_step();

  // Rank 0 of `world` (whose messages lie in host memory) writes profile.json and trace.json of all ranks into the
  // folder. Collective.
  void write(Communicator& world, const std::string& folder) const;
  // Of this rank, to be read; empty where no profile is made.
  std::string profile_table() const;

  void on_op(const OpCost& cost, OpTime time) override;
  void on_activity(const Activity& activity, OpTime time) override;
  void on_call(std::string_view label, int64_t bytes, double started, double waited_from, double done) override;
  void before(std::string_view name) override;
  void after() override;

 private:
  bool tracing() const { return trace_ && step_ == traced_step_; }
  bool watching() const { return in_step_ && (profile_ || tracing()); }

  Device& device_;
  int64_t first_step_;
  int64_t last_step_;
  int64_t traced_step_;
  int64_t step_ = 0;
  bool in_step_ = false;
  std::chrono::steady_clock::time_point step_begin_;
  std::optional<StepProfile> profile_;
  std::optional<StepTrace> trace_;
};

}  // namespace farspan
