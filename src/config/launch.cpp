// SPDX-License-Identifier: Apache-2.0
#include "config/launch.h"

#include <cstdint>
#include <fmt/format.h>
#include <utility>

#include "base/error.h"
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

[[noreturn]] void refuse(const char* launcher, const char* name, int64_t processes) {
  throw ConfigError(fmt::format(
      "{} started {} processes ({}={}), but this version's world is one process whose ranks are threads; start "
      "farspan once, without the launcher, with --ranks {}",
      launcher, processes, name, processes, processes));
}

}  // namespace

void refuse_process_launchers(const std::function<const char*(const char*)>& variable) {
  constexpr std::pair<const char*, const char*> kSizes[] = {
      {"mpirun", "OMPI_COMM_WORLD_SIZE"}, {"the MPI launcher", "PMI_SIZE"}, {"srun", "SLURM_STEP_NUM_TASKS"}};
  for (const auto& [launcher, name] : kSizes) {
    const int64_t processes = count_of(variable(name));
    if (processes > 1) refuse(launcher, name, processes);
  }
  // A task number above 0 tells of other tasks even where the step's own count is missing.
  const int64_t tasks = count_of(variable("SLURM_NTASKS"));
  if (tasks > 1 && count_of(variable("SLURM_PROCID")) > 0) refuse("srun", "SLURM_NTASKS", tasks);
}

}  // namespace farspan
