// SPDX-License-Identifier: Apache-2.0
// How the program was started. This version runs its ranks as threads of one process; a launcher that starts several
// processes would give as many independent runs that write over one another.
#pragma once

#include <functional>
#include <string>

namespace farspan {

// Throws ConfigError when the environment says that a launcher (Open MPI, MPICH and other PMI launchers, Slurm's srun)
// started more than one process. `variable` returns an environment variable's value, or null.
//
// Slurm sets SLURM_NTASKS for a batch script too, which is one process; a step of srun has SLURM_STEP_NUM_TASKS.
void refuse_process_launchers(const std::function<const char*(const char*)>& variable);

}  // namespace farspan
