// SPDX-License-Identifier: Apache-2.0
// A job: a configuration made ready to run (checked, sized, planned, data opened), and the ranks that run it. Whatever
// can be wrong with it is said while it is made, before any rank starts.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/threads/thread_world.h"
#include "config/config.h"
#include "data/dataset.h"
#include "train/rank_trainer.h"
#include "train/record.h"

namespace farspan {

struct Job {
  Config config;  // resolved
  ResolvedSizes sizes;
  RunKind kind = RunKind::train;
  std::shared_ptr<const Dataset> dataset;  // null where none was asked for
  std::vector<RankRecord> records;         // of every rank

  std::vector<int64_t> planned_bytes() const;  // of every rank
};

enum class JobData { open, none };

// Throws ConfigError, DataError or MemoryError (the plan does not fit; not checked with JobData::none).
Job make_job(Config config, int world_size, RunKind kind, JobData data);

// The same with a dataset at hand.
Job make_job(Config config, int world_size, RunKind kind, std::shared_ptr<const Dataset> dataset);

// Starts the job's ranks and runs `body` on each, in its own arena laid out by the plan. Rethrows the first failure.
void run_job(const Job& job, const std::function<void(RankTrainer& trainer, ThreadWorld& world)>& body);

}  // namespace farspan
