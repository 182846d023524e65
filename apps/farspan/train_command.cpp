// SPDX-License-Identifier: Apache-2.0
// farspan train: checks and plans the run, says what it will do, trains.
#include <cstdio>
#include <fmt/format.h>

#include "command.h"
#include "config/command_line.h"
#include "config/load.h"
#include "config/validate.h"
#include "observe/progress.h"
#include "train/run_training.h"

namespace farspan {
namespace {

void describe(const Job& job, const std::string& folder) {
  int64_t total = 0;
  for (int64_t bytes : job.planned_bytes()) total += bytes;
  fmt::print("{}", effective_config_yaml(job.config));
  fmt::print("\n{}\n", job.dataset->summary());
  fmt::print("{} parameters; weight decay on matrices and embeddings, not on norms and biases\n",
             ParameterTable(job.config.model).parameter_count());
  fmt::print("{} ranks: cp {}, dp {}; {} of memory planned for all ranks\n", job.sizes.world_size,
             job.config.parallel.context_parallel_size, job.sizes.data_parallel_size, bytes_text(total));
  fmt::print("document mask {}, positions {} at document starts; writing to {}\n\n",
             job.config.data.document_mask ? "on" : "off",
             job.config.data.reset_position_ids ? "restart" : "do not restart", folder);
  std::fflush(stdout);
}

}  // namespace

int run_train(const CommandLine& line) {
  const Config config = load_config(line);
  const Job job = make_job(config, world_size(config, line.ranks), RunKind::train, JobData::open);
  const std::string folder = line.output.empty() ? "runs/" + job.config.name : line.output;
  describe(job, folder);
  return run_training(job, folder);
}

}  // namespace farspan
