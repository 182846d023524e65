// SPDX-License-Identifier: Apache-2.0
// A plan of a step from what the dry device recorded: memory by rank and purpose, bytes on each dimension, and a time
// by a simple model in which every op runs at its class's rate:
//
//   compute = sum over classes of flops / rate (gemm, attention) or bytes / bandwidth (memory)
//   cp      = bytes received / link; of it p2p hides what fits behind attention, all_gather nothing
//   dp      = bytes received / link, all exposed (the gradient sum comes after the backward)
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "plan/machine.h"
#include "train/job.h"

namespace farspan {

struct StepPlan {
  double seconds = 0;
  double exposed_communication_seconds = 0;
  double model_flops = 0;                    // of the whole job
  std::array<int64_t, kDimensions> bytes{};  // received per step, all ranks together
  bool fits = true;
  int64_t total_bytes = 0;  // of all ranks' plans
  int64_t limit_bytes = 0;
};

// The job is made with JobData::none or ::open. The slowest rank decides the time.
StepPlan plan_step(const Job& job, const Machine& machine);

// The JSON of docs: fits, ranks (peak_bytes, by_purpose), step, assumptions.
std::string plan_json(const Job& job, const Machine& machine, const StepPlan& plan);

// The same for people.
std::string plan_text(const Job& job, const Machine& machine, const StepPlan& plan);

}  // namespace farspan
