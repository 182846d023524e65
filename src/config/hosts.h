// SPDX-License-Identifier: Apache-2.0
// Which machine each rank is on. Ranks fill one machine after the other, as mpirun and srun place them by default.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace farspan {

class HostMap {
 public:
  // `ranks_per_host` on every machine, fewer on the last where the world does not divide. Both at least 1.
  HostMap(int64_t world, int64_t ranks_per_host);
  // Counts of ranks, at least one machine and 1 rank on each.
  explicit HostMap(std::vector<int64_t> ranks_of_hosts);

  int64_t hosts() const { return static_cast<int64_t>(ends_.size()); }
  int64_t world() const { return ends_.back(); }
  int64_t first_rank(int64_t host) const { return host == 0 ? 0 : ends_[static_cast<size_t>(host - 1)]; }
  int64_t end_rank(int64_t host) const { return ends_[static_cast<size_t>(host)]; }  // one past the last
  int64_t host_of(int64_t rank) const;

 private:
  std::vector<int64_t> ends_;  // one past the last rank of each machine
};

// What the launcher says of the placement of its processes: Slurm's SLURM_STEP_TASKS_PER_NODE ("4(x2),3"), Open MPI's
// OMPI_COMM_WORLD_LOCAL_SIZE with OMPI_COMM_WORLD_SIZE, MPICH's MPI_LOCALNRANKS with PMI_SIZE. Nothing without a
// launcher, or where it says nothing that can be read. `variable` returns an environment variable's value, or null.
std::optional<HostMap> hosts_of_launcher(const std::function<const char*(const char*)>& variable);

}  // namespace farspan
