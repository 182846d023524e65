// SPDX-License-Identifier: Apache-2.0
// How the program was started: alone, or by a launcher as one of several processes of a job. The environment says it
// before any library is asked, and the two must agree (Processes).
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "config/config.h"

namespace farspan {

struct Launch {
  int processes = 1;
  int64_t process = 0;  // this one's number among them
  std::string claim;    // "mpirun started 8 processes (OMPI_COMM_WORLD_SIZE=8)"; empty: one process
};

// From the variables of Open MPI, of MPICH and other PMI launchers, and of Slurm's srun. `variable` returns an
// environment variable's value, or null.
//
// Slurm sets SLURM_NTASKS for a batch script too, which is one process; a step of srun has SLURM_STEP_NUM_TASKS.
Launch read_launch(const std::function<const char*(const char*)>& variable);

// The ranks to start: the launcher's processes where there are several, else `ranks` (0: not given). Throws ConfigError
// where both are given and differ.
int64_t agreed_ranks(int64_t ranks, const Launch& launch);

// Whether each rank is a process of its own (else a thread of this one). Throws ConfigError where communication.backend
// asks for what the launch does not give.
bool ranks_are_processes(const CommunicationConfig& communication, const Launch& launch, int world_size);

}  // namespace farspan
