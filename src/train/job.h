// SPDX-License-Identifier: Apache-2.0
// A job: a configuration made ready to run (checked, sized, planned, data opened), and the ranks that run it. Whatever
// can be wrong with it is said while it is made, before any rank starts.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/world.h"
#include "config/config.h"
#include "data/dataset.h"
#include "train/rank_trainer.h"
#include "train/record.h"

namespace farspan {

class Processes;

struct Job {
  Config config;  // resolved
  ResolvedSizes sizes;
  RunKind kind = RunKind::train;
  std::shared_ptr<const Dataset> dataset;  // null where none was asked for
  std::vector<RankRecord> records;         // of every rank
  Processes* processes = nullptr;          // that its ranks are; null: threads of this one
  int threads = 1;                         // that one op of a rank may use

  std::vector<int64_t> planned_bytes() const;  // of every rank
  // Whether this process runs rank 0, which alone writes and shows what is the whole job's.
  bool runs_rank_0() const;
};

enum class JobData { open, none };

// Each rank gets its share of this machine's cores. Throws ConfigError, DataError or MemoryError (the ranks on this
// machine do not fit; not checked with JobData::none).
Job make_job(Config config, int world_size, RunKind kind, JobData data, Processes* processes = nullptr);

// The same with a dataset at hand.
Job make_job(Config config, int world_size, RunKind kind, std::shared_ptr<const Dataset> dataset,
             Processes* processes = nullptr);

// Starts the job's ranks, or those of them that this process runs, and runs `body` on each, in its own arena laid out
// by the plan. Returns when all ranks of the job have ended. Throws the job's first failure.
void run_job(const Job& job, const std::function<void(RankTrainer& trainer, World& world)>& body);

}  // namespace farspan
