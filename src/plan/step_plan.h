// SPDX-License-Identifier: Apache-2.0
// A plan of a step from what the dry device recorded: memory by rank and purpose, bytes on each dimension, and a time
// by a simple model in which every op runs at its class's rate and every byte received at its link's:
//
//   compute = sum over classes of flops / rate (gemm, attention) or bytes / bandwidth (memory)
//   cp      of it layers with p2p hide what fits behind attention, others nothing
//   tp, pp  nothing hidden
//   dp      with overlap_grad_reduce what fits behind a backward (2/3 of a micro-batch's compute) is hidden, with
//           overlap_param_gather what fits behind a forward (1/3); without them nothing
//   step    = micro_batches * (slowest rank's compute + exposed) + update + pipeline idle time,
//   idle    = (pp - 1) / chunks * slowest rank's micro-batch          Narayanan et al., 2021, section 2.2
//
// A dimension whose group lies on several machines runs at the network's rate.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "config/hosts.h"
#include "plan/machine.h"
#include "train/job.h"

namespace farspan {

// Received in a step, summed over ranks; by Dimension.
using BytesByDimension = std::array<int64_t, kDimensions>;

struct StepPlan {
  double seconds = 0;
  double exposed_communication_seconds = 0;
  double pipeline_idle_seconds = 0;
  double model_flops = 0;  // of the whole job
  BytesByDimension bytes{};
  bool fits = true;
  int64_t fullest_host = 0;
  int64_t total_bytes = 0;  // of the ranks' plans on that machine
  int64_t limit_bytes = 0;  // of one machine
};

// The job is made with JobData::none or ::open. `hosts` is of the job's world.
StepPlan plan_step(const Job& job, const Machine& machine, const HostMap& hosts);

// The bytes alone, for worlds of any size: no more records are held than one.
// `config` is resolved, its vocabulary known.
BytesByDimension step_bytes(const Config& config, const ResolvedSizes& sizes);

// The JSON of docs: fits, ranks (peak_bytes, by_purpose), step, assumptions.
std::string plan_json(const Job& job, const Machine& machine, const HostMap& hosts, const StepPlan& plan);

// The same for people.
std::string plan_text(const Job& job, const Machine& machine, const HostMap& hosts, const StepPlan& plan);

}  // namespace farspan
