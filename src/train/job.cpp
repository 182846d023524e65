// SPDX-License-Identifier: Apache-2.0
#include "train/job.h"

#include <numeric>

#include "base/log.h"
#include "base/math.h"
#include "comm/mpi/mpi_world.h"
#include "comm/threads/thread_world.h"
#include "config/validate.h"
#include "data/tokenizer.h"
#include "train/address_space.h"
#include "train/agreement.h"

namespace farspan {

std::vector<int64_t> Job::planned_bytes() const {
  std::vector<int64_t> bytes;
  for (const RankRecord& record : records) bytes.push_back(record.memory->peak_bytes);
  return bytes;
}

namespace {

// A GPU where there is one, unless the configuration says otherwise.
void choose_device(Config& config) {
  if (config.training.device != DeviceChoice::automatic) return;
  config.training.device = cuda_device_count() > 0 ? DeviceChoice::cuda : DeviceChoice::cpu;
  config.origins["training.device"] = "derived";
}

void check_gpu(const Config& config) {
  const bool fp8_on_gpu = config.training.precision == Precision::fp8 && config.training.device == DeviceChoice::cuda;
  if (fp8_on_gpu && cuda_device_count() > 0 && !cuda_has_fp8(0))
    throw ConfigError(
        fmt::format("precision fp8: {} has no matrix units for 8-bit floats; use precision bf16", cuda_device_name(0)));
}

// Resolved, and with the tokenizer's vocabulary where the configuration gives none.
ResolvedSizes resolve_with_vocabulary(Config& config, int world_size) {
  choose_device(config);
  check_gpu(config);
  ResolvedSizes sizes = resolve(config, world_size);
  if (config.model.vocab_size > 0) return sizes;
  config.model.vocab_size = Tokenizer::from_name(config.data.tokenizer).vocab_size();
  config.origins["model.vocab_size"] = "tokenizer";
  return resolve(config, world_size);
}

// `config` and `sizes` are resolved.
Job recorded_job(Config config, const ResolvedSizes& sizes, RunKind kind, std::shared_ptr<const Dataset> dataset,
                 Processes* processes) {
  Job job = {.config = std::move(config),
             .sizes = sizes,
             .kind = kind,
             .dataset = std::move(dataset),
             .records = {},
             .processes = processes,
             .threads = processes ? processes->threads() : threads_per_rank(static_cast<int>(sizes.world_size))};
  job.records = record_ranks(job.config, job.sizes, kind, processes ? job.threads : usable_cores());
  return job;
}

// How thread ranks on GPUs reach each other.
GpuBackend gpu_backend(Backend backend) {
  if (backend == Backend::nccl) return GpuBackend::nccl;
  return backend == Backend::threads ? GpuBackend::copies : GpuBackend::automatic;
}

// Of the ranks that share this machine's memory.
std::vector<RankRecord> records_of_this_machine(const Job& job) {
  if (job.processes == nullptr) return job.records;
  std::vector<RankRecord> records;
  for (int rank : job.processes->ranks_of_this_host()) records.push_back(job.records[static_cast<size_t>(rank)]);
  return records;
}

// That the ranks of this process find room for their memory and threads.
void check_process_holds(const Job& job) {
  if (device_kind(job.config) != DeviceKind::cpu) return;
  int64_t planned = 0;
  if (job.processes != nullptr)
    planned = job.records[static_cast<size_t>(job.processes->rank())].memory->peak_bytes;
  else
    for (int64_t bytes : job.planned_bytes()) planned += bytes;
  const int64_t ranks = job.processes != nullptr ? 1 : job.sizes.world_size;
  check_address_space(planned, checked_mul(ranks, job.threads), address_space_left());
}

}  // namespace

bool Job::runs_rank_0() const { return processes == nullptr || processes->rank() == 0; }

Job make_job(Config config, int world_size, RunKind kind, JobData data, Processes* processes) {
  const ResolvedSizes sizes = resolve_with_vocabulary(config, world_size);
  if (data == JobData::open && config.data.path.empty())
    throw ConfigError("data.path is empty; give a file, a folder or a list of them");
  if (data == JobData::open)
    return make_job(config, world_size, kind, Dataset::open(config.data, config.model.vocab_size), processes);
  return recorded_job(std::move(config), sizes, kind, nullptr, processes);
}

Job make_job(Config config, int world_size, RunKind kind, std::shared_ptr<const Dataset> dataset,
             Processes* processes) {
  const ResolvedSizes sizes = resolve_with_vocabulary(config, world_size);
  if (dataset->rows(Split::held_out) == 0) config.training.eval_iters = 0;
  Job job = recorded_job(std::move(config), sizes, kind, std::move(dataset), processes);
  check_fits(job.config, records_of_this_machine(job));
  check_process_holds(job);
  return job;
}

void run_job(const Job& job, const std::function<void(RankTrainer&, World&)>& body) {
  const Grid grid = grid_of(job.config, job.sizes);
  const int size = static_cast<int>(job.sizes.world_size);
  const RankBody run_rank = [&](int rank, World& world) {
    const LogRank log_rank(rank);
    if (job.processes) {
      std::vector<int> everyone(static_cast<size_t>(size));
      std::iota(everyone.begin(), everyone.end(), 0);
      check_agreement(*world.group(rank, everyone, Dimension::world), job.config,
                      job.dataset ? job.dataset->identity() : "");
    }
    const DeviceKind kind = device_kind(job.config);
    Device device(kind, job.threads, kind == DeviceKind::cuda ? world.gpu_of(rank) : 0);
    device.set_deterministic(job.config.training.deterministic);
    Arena arena(device, *job.records[static_cast<size_t>(rank)].memory);
    RankContext context(rank, grid, device, arena);
    make_groups(context, [&](std::vector<int> ranks, Dimension dimension) {
      // Scalars that the host reads go over the group of all ranks.
      return dimension == Dimension::world ? world.group(rank, std::move(ranks), dimension)
                                           : world.group(rank, std::move(ranks), dimension, device);
    });
    RankTrainer trainer(job.config, job.sizes, context, job.dataset.get(), job.kind);
    body(trainer, world);
  };
  const double timeout_seconds = job.config.communication.distributed_timeout_seconds;
  if (job.processes)
    run_process_rank(*job.processes, timeout_seconds, run_rank);
  else
    run_thread_ranks(size, timeout_seconds, run_rank, kGraceSeconds, gpu_backend(job.config.communication.backend));
}

}  // namespace farspan
