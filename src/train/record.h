// SPDX-License-Identifier: Apache-2.0
// Runs one rank's program on the dry device: the same code as training, which computes and moves nothing, and leaves
// the memory plan, the FLOPs and bytes of every op, and the bytes on every dimension's links.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/communicator.h"
#include "config/config.h"
#include "memory/arena.h"
#include "parallel/grid.h"
#include "train/rank_trainer.h"

namespace farspan {

inline constexpr int kOpClasses = 4;

struct OpTotals {
  double flops = 0;
  double bytes = 0;
  int64_t calls = 0;
  bool operator==(const OpTotals&) const = default;
};

struct PhaseCost {
  std::array<OpTotals, kOpClasses> ops;      // by OpClass
  std::array<Traffic, kDimensions> traffic;  // by Dimension, of this rank
  bool operator==(const PhaseCost&) const = default;
};

struct RankRecord {
  std::shared_ptr<const MemoryPlan> memory;  // ranks that take the same buffers share one
  PhaseCost micro_batch;                     // forward and backward of one micro-batch
  PhaseCost update;                          // once a step: gradient sum and optimizer
};

Grid grid_of(const Config& config, const ResolvedSizes& sizes);

// The plans of a job's ranks. Most ranks take the same buffers in the same order, and laying these out is the larger
// part of recording a rank.
class SharedPlans {
 public:
  // The plan of all ranks with this recording, not laid out yet; by any thread.
  std::shared_ptr<const MemoryPlan> shared(MemoryPlan recorded);
  // Lays out all of them, up to `threads` at a time.
  void lay_out(int threads);

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<MemoryPlan>> plans_;
};

// Without `plans` the costs alone; else also the rank's memory plan, which `plans` is to lay out.
RankRecord record_rank(const Config& config, const ResolvedSizes& sizes, int rank, RunKind kind, SharedPlans* plans);

// For every rank of the world the first one that does the same on the dry device: ranks that differ in rows alone,
// where their shards make no difference to what tensor parallelism has yet to sum, and tensor-parallel ranks with parts
// of one size.
std::vector<int> ranks_alike(const Config& config, const ResolvedSizes& sizes);

// The records of all ranks of the world, up to `threads` at a time.
std::vector<RankRecord> record_ranks(const Config& config, const ResolvedSizes& sizes, RunKind kind, int threads);

// Throws MemoryError when the ranks' planned bytes together pass the limit (memory_limit, or what the machine has
// available), with the numbers and what would help.
void check_fits(const Config& config, const std::vector<RankRecord>& records);

// The limit check_fits holds against, in bytes.
int64_t memory_limit_bytes(const Config& config);

// The kind of device that ranks compute on; `device` is resolved (train/job.h).
DeviceKind device_kind(const Config& config);
// Of `ranks` ranks on one machine, rank i of them computes on device i % devices_of_machine: 1 for a CPU, the GPUs that
// there are, or, in a plan for a machine with GPUs that this is not, one GPU each.
int devices_of_machine(const Config& config, int ranks);

}  // namespace farspan
