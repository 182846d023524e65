// SPDX-License-Identifier: Apache-2.0
#include "config/hosts.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/error.h"
#include "base/math.h"
#include "config/value_text.h"

namespace farspan {
namespace {

constexpr int64_t kMostRanksOfLauncher = int64_t{1} << 20;  // keeps what a broken environment says from filling memory

// The text as a count of 1 or more; 0 when it is none.
int64_t count_of(std::string_view text) {
  try {
    return std::max<int64_t>(0, read_integer(text));
  } catch (const ValueError&) {
    return 0;
  }
}

int64_t count_of(const char* text) { return text == nullptr ? 0 : count_of(std::string_view(text)); }

// "4(x2),3": 4 ranks on each of two machines, then 3 on one. Empty when it is not of this form.
std::vector<int64_t> slurm_counts(std::string_view text) {
  std::vector<int64_t> counts;
  for (const std::string& part : split_commas(text)) {
    const size_t times = part.find("(x");
    const int64_t ranks = count_of(std::string_view(part).substr(0, times));
    int64_t hosts = 1;
    if (times != std::string::npos) {
      if (part.back() != ')') return {};
      hosts = count_of(std::string_view(part).substr(times + 2, part.size() - times - 3));
    }
    if (ranks < 1 || hosts < 1 || std::ssize(counts) + hosts > kMostRanksOfLauncher) return {};
    counts.insert(counts.end(), static_cast<size_t>(hosts), ranks);
  }
  return counts;
}

}  // namespace

HostMap::HostMap(int64_t world, int64_t ranks_per_host) {
  FARSPAN_CHECK(world >= 1 && ranks_per_host >= 1, "hosts: {} ranks, {} on each", world, ranks_per_host);
  for (int64_t end = 0; end < world;) ends_.push_back(end = std::min(world, end + ranks_per_host));
}

HostMap::HostMap(std::vector<int64_t> ranks_of_hosts) : ends_(std::move(ranks_of_hosts)) {
  FARSPAN_CHECK(!ends_.empty() && *std::min_element(ends_.begin(), ends_.end()) >= 1, "hosts: one without ranks");
  std::partial_sum(ends_.begin(), ends_.end(), ends_.begin());
}

int64_t HostMap::host_of(int64_t rank) const {
  FARSPAN_CHECK(rank >= 0 && rank < world(), "hosts: there is no rank {} of {}", rank, world());
  return std::upper_bound(ends_.begin(), ends_.end(), rank) - ends_.begin();
}

std::optional<HostMap> hosts_of_launcher(const std::function<const char*(const char*)>& variable) {
  if (const char* slurm = variable("SLURM_STEP_TASKS_PER_NODE")) {
    std::vector<int64_t> counts = slurm_counts(slurm);
    if (!counts.empty()) return HostMap(std::move(counts));
  }
  for (const auto& [total, local] :
       {std::pair{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"}, std::pair{"PMI_SIZE", "MPI_LOCALNRANKS"}}) {
    const int64_t world = count_of(variable(total));
    const int64_t near = count_of(variable(local));
    if (world >= 1 && world <= kMostRanksOfLauncher && near >= 1 && near <= world) return HostMap(world, near);
  }
  return std::nullopt;
}

}  // namespace farspan
