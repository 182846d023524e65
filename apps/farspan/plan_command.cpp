// SPDX-License-Identifier: Apache-2.0
// farspan plan: memory by rank and purpose, bytes and time of a step, from the dry device. Reads no data. A plan that
// does not fit is printed all the same, and is status 4.
#include <cstdio>

#include "command.h"
#include "config/command_line.h"
#include "config/validate.h"
#include "plan/step_plan.h"

namespace farspan {

int run_plan(const CommandLine& line) {
  const Config config = load_config(line);
  const Job job = make_job(config, world_size(config, line.ranks), RunKind::train, JobData::none);
  const Machine machine = cpu_machine(job.config.training.precision, usable_cores(), job.sizes.world_size);
  const StepPlan plan = plan_step(job, machine);
  const std::string text = line.json ? plan_json(job, machine, plan) : plan_text(job, machine, plan);
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
  check_fits(job.config, job.records);
  return 0;
}

}  // namespace farspan
