// SPDX-License-Identifier: Apache-2.0
// farspan train: checks and plans the run, says what it will do, trains.
#include <cstdio>
#include <fmt/format.h>

#include "command.h"
#include "config/command_line.h"
#include "config/load.h"
#include "config/validate.h"
#include "observe/progress.h"
#include "plan/machine.h"
#include "train/run_training.h"
#include "train/stop_signal.h"

namespace farspan {
namespace {

void describe(const Job& job, const std::string& folder) {
  int64_t total = 0;
  for (int64_t bytes : job.planned_bytes()) total += bytes;
  fmt::print("{}", effective_config_yaml(job.config));
  fmt::print("\n{}\n", job.dataset->summary());
  fmt::print("{} parameters; weight decay on matrices and embeddings, not on norms and biases\n",
             ParameterTable(job.config.model).parameter_count());
  const ParallelConfig& parallel = job.config.parallel;
  fmt::print("{} ranks{}: tp {}, cp {}, dp {}, pp {}; {} of memory planned for all ranks\n", job.sizes.world_size,
             job.processes ? " as processes" : "", parallel.tensor_model_parallel_size, parallel.context_parallel_size,
             job.sizes.data_parallel_size, parallel.pipeline_model_parallel_size, bytes_text(total));
  fmt::print("document mask {}, positions {} at document starts; writing to {}\n\n",
             job.config.data.document_mask ? "on" : "off",
             job.config.data.reset_position_ids ? "restart" : "do not restart", folder);
  std::fflush(stdout);
}

int64_t ranks_of_this_machine(const Job& job) {
  return job.processes ? std::ssize(job.processes->ranks_of_this_host()) : job.sizes.world_size;
}

}  // namespace

int run_train(const CommandLine& line, Session& session) {
  const StopSignal stop_signal;
  const Config config = load_config(line);
  const int ranks = world_size(config, line.ranks);
  const Job job = make_job(config, ranks, RunKind::train, JobData::open, session.processes_for(config, ranks));
  const std::string folder = line.output.empty() ? "runs/" + job.config.name : line.output;
  describe(job, folder);
  if (session.speaks()) print_warnings(job.sizes.warnings);
  Observation observation;
  observation.profile = line.profile;
  observation.ceilings = ceilings_of(machine_for(job.config, ranks_of_this_machine(job)));
  return run_training(job, folder, observation);
}

}  // namespace farspan
