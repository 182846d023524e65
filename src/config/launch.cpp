// SPDX-License-Identifier: Apache-2.0
#include "config/launch.h"

#include <cstdint>
#include <fmt/format.h>

#include "base/error.h"
#include "config/validate.h"
#include "config/value_text.h"

namespace farspan {
namespace {

// The variable as a count; 0 when it is absent or no number.
int64_t count_of(const char* text) {
  if (text == nullptr) return 0;
  try {
    return read_integer(text);
  } catch (const ValueError&) {
    return 0;
  }
}

Launch launched(const char* launcher, const char* name, int64_t processes, int64_t process) {
  const std::string claim = fmt::format("{} started {} processes ({}={})", launcher, processes, name, processes);
  if (processes > kMostRanks) throw ConfigError(fmt::format("{}; at most {} ranks", claim, kMostRanks));
  return {static_cast<int>(processes), process, claim};
}

}  // namespace

Launch read_launch(const std::function<const char*(const char*)>& variable) {
  struct Variables {
    const char* launcher;
    const char* size;
    const char* number;
  };
  constexpr Variables kLaunchers[] = {{"mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                                      {"the MPI launcher", "PMI_SIZE", "PMI_RANK"},
                                      {"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"}};
  for (const Variables& names : kLaunchers) {
    const int64_t processes = count_of(variable(names.size));
    if (processes > 1) return launched(names.launcher, names.size, processes, count_of(variable(names.number)));
  }
  // A task number above 0 tells of other tasks even where the step's own count is missing.
  const int64_t tasks = count_of(variable("SLURM_NTASKS"));
  const int64_t task = count_of(variable("SLURM_PROCID"));
  if (tasks > 1 && task > 0) return launched("srun", "SLURM_NTASKS", tasks, task);
  return {};
}

int64_t agreed_ranks(int64_t ranks, const Launch& launch) {
  if (launch.processes == 1) return ranks;
  if (ranks != 0 && ranks != launch.processes)
    throw ConfigError(
        fmt::format("--ranks {}, but {}; leave --ranks out, or start {} processes", ranks, launch.claim, ranks));
  return launch.processes;
}

bool ranks_are_processes(const CommunicationConfig& communication, const Launch& launch, int world_size) {
  if (launch.processes > 1) {
    if (communication.backend == Backend::threads)
      throw ConfigError(fmt::format(
          "communication.backend threads has all ranks in one process, but {}; use mpi or auto, or start one process "
          "without the launcher with --ranks {}",
          launch.claim, launch.processes));
    return true;
  }
  if (communication.backend != Backend::mpi) return false;
  if (world_size > 1)
    throw ConfigError(fmt::format(
        "communication.backend mpi has one rank in each process, but this process was started alone for {} ranks; "
        "start it with mpirun -n {}, or use backend threads",
        world_size, world_size));
  return true;
}

}  // namespace farspan
