// SPDX-License-Identifier: Apache-2.0
// farspan plan: memory by rank and purpose, bytes and time of a step, from the dry device. Reads no data. A plan that
// does not fit is printed all the same, and is status 4.
#include <cstdio>

#include "command.h"
#include "config/command_line.h"
#include "config/hosts.h"
#include "config/poor_choices.h"
#include "config/validate.h"
#include "plan/step_plan.h"

namespace farspan {

int run_plan(const CommandLine& line) {
  const Config config = load_config(line);
  const Job job = make_job(config, world_size(config, line.ranks), RunKind::train, JobData::none);
  const int64_t world = job.sizes.world_size;
  const HostMap hosts(world, line.ranks_per_host > 0 ? line.ranks_per_host : world);
  const Machine machine = machine_for(job.config, hosts.end_rank(0));
  const StepPlan plan = plan_step(job, machine, hosts);
  print_warnings(job.sizes.warnings);
  print_warnings(poor_placement(job.config.parallel, job.sizes, hosts));
  const std::string text = line.json ? plan_json(job, machine, hosts, plan) : plan_text(job, machine, hosts, plan);
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
  const auto of_host = [&](int64_t rank) { return job.records.begin() + rank; };
  check_fits(job.config, {of_host(hosts.first_rank(plan.fullest_host)), of_host(hosts.end_rank(plan.fullest_host))});
  return 0;
}

}  // namespace farspan
