// SPDX-License-Identifier: Apache-2.0
// What a plan takes to be hidden of the keys and values that travel.
#include "plan/step_plan.h"

#include <gtest/gtest.h>

namespace farspan {
namespace {

// Seconds that a step waits, over 4 GPUs whose link brings `link` bytes a second.
double waiting(CpCommType type, bool overlap, double link) {
  Config config;
  config.model.num_layers = 2;
  config.model.hidden_size = 1024;
  config.model.num_attention_heads = 16;
  config.model.num_query_groups = 8;
  config.model.vocab_size = 257;
  config.data.seq_length = 32768;
  config.training.device = DeviceChoice::cuda;
  config.training.precision = Precision::bf16;
  config.parallel.context_parallel_size = 4;
  config.parallel.cp_comm_type = {type};
  config.communication.cp_allgather_overlap = overlap;
  const Job job = make_job(config, 4, RunKind::train, JobData::none);
  Machine machine = gpu_machine("NVIDIA H200", Precision::bf16, 64, 1);
  machine.link_bandwidth = link;
  return plan_step(job, machine, HostMap(4, 4)).exposed_communication_seconds;
}

TEST(StepPlan, AGatherHidesAllButItsFirstHeads) {
  for (const double link : {1e9, 10e9, 300e9}) {
    SCOPED_TRACE(link);
    const double ring = waiting(CpCommType::p2p, true, link);
    const double gathered = waiting(CpCommType::all_gather, true, link);
    EXPECT_LE(ring, gathered);
    EXPECT_LT(gathered, waiting(CpCommType::all_gather, false, link));
  }
}

}  // namespace
}  // namespace farspan
