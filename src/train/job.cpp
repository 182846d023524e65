// SPDX-License-Identifier: Apache-2.0
#include "train/job.h"

#include "base/log.h"
#include "config/validate.h"
#include "data/tokenizer.h"

namespace farspan {

std::vector<int64_t> Job::planned_bytes() const {
  std::vector<int64_t> bytes;
  for (const RankRecord& record : records) bytes.push_back(record.memory.peak_bytes);
  return bytes;
}

namespace {

// Resolved, and with the tokenizer's vocabulary where the configuration gives none.
ResolvedSizes resolve_with_vocabulary(Config& config, int world_size) {
  ResolvedSizes sizes = resolve(config, world_size);
  if (config.model.vocab_size > 0) return sizes;
  config.model.vocab_size = Tokenizer::from_name(config.data.tokenizer).vocab_size();
  config.origins["model.vocab_size"] = "tokenizer";
  return resolve(config, world_size);
}

}  // namespace

Job make_job(Config config, int world_size, RunKind kind, JobData data) {
  const ResolvedSizes sizes = resolve_with_vocabulary(config, world_size);
  if (data == JobData::open)
    return make_job(config, world_size, kind, Dataset::open(config.data, config.model.vocab_size));
  Job job = {.config = std::move(config), .sizes = sizes, .kind = kind, .dataset = nullptr, .records = {}};
  job.records = record_ranks(job.config, job.sizes, kind);
  return job;
}

Job make_job(Config config, int world_size, RunKind kind, std::shared_ptr<const Dataset> dataset) {
  const ResolvedSizes sizes = resolve_with_vocabulary(config, world_size);
  if (dataset->rows(Split::held_out) == 0) config.training.eval_iters = 0;
  Job job = {.config = std::move(config), .sizes = sizes, .kind = kind, .dataset = std::move(dataset), .records = {}};
  job.records = record_ranks(job.config, job.sizes, kind);
  check_fits(job.config, job.records);
  return job;
}

void run_job(const Job& job, const std::function<void(RankTrainer&, ThreadWorld&)>& body) {
  const Grid grid = grid_of(job.config, job.sizes);
  const int threads = threads_per_rank(static_cast<int>(job.sizes.world_size));
  run_thread_ranks(static_cast<int>(job.sizes.world_size), job.config.communication.distributed_timeout_seconds,
                   [&](int rank, ThreadWorld& world) {
                     const LogRank log_rank(rank);
                     Device device(DeviceKind::cpu, threads);
                     Arena arena(device, job.records[static_cast<size_t>(rank)].memory);
                     RankContext context = {
                         .rank = rank, .grid = &grid, .device = &device, .arena = &arena, .groups = {}};
                     make_groups(context, [&](std::vector<int> ranks, Dimension dimension) {
                       return world.group(rank, std::move(ranks), dimension);
                     });
                     RankTrainer trainer(job.config, job.sizes, context, job.dataset.get(), job.kind);
                     body(trainer, world);
                   });
}

}  // namespace farspan
