// SPDX-License-Identifier: Apache-2.0
#include "train/record.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/math.h"
#include "comm/dry/dry_communicator.h"
#include "train/address_space.h"

namespace farspan {
namespace {

// What the CUDA context and the libraries' own code and tables take beside the plan, to be left free.
constexpr int64_t kLibraryBytes = int64_t{1} << 30;
// Of the GPU that plans are made for where there is none to ask: an H200.
constexpr int64_t kPlannedGpuBytes = int64_t{140} << 30;

class OpSum : public OpObserver {
 public:
  void on_op(const OpCost& cost, OpTime) override {
    OpTotals& totals = ops[static_cast<size_t>(cost.op_class)];
    totals.flops += cost.flops;
    totals.bytes += cost.bytes;
    ++totals.calls;
  }
  std::array<OpTotals, kOpClasses> ops{};
};

// What a rank's ops and links cost, from its making on.
class CostMeter {
 public:
  explicit CostMeter(RankContext& context) : context_(context) { start(); }
  ~CostMeter() { context_.observe_ops(nullptr); }
  CostMeter(const CostMeter&) = delete;
  CostMeter& operator=(const CostMeter&) = delete;
  // Since the making, or the last call.
  PhaseCost read() {
    PhaseCost cost;
    cost.ops = sum_.ops;
    for (size_t i = 0; i < cost.traffic.size(); ++i) cost.traffic[i] = context_.traffic(static_cast<Dimension>(i));
    start();
    return cost;
  }

 private:
  void start() {
    sum_ = {};
    context_.observe_ops(&sum_);
    context_.reset_traffic();
  }
  RankContext& context_;
  OpSum sum_;
};

// To the cost of one of the equal `parts`.
void divide(PhaseCost& cost, int64_t parts) {
  for (OpTotals& totals : cost.ops) {
    totals.flops /= static_cast<double>(parts);
    totals.bytes /= static_cast<double>(parts);
    totals.calls /= parts;
  }
  for (Traffic& traffic : cost.traffic) {
    traffic.bytes_sent /= parts;
    traffic.bytes_received /= parts;
    traffic.calls /= parts;
  }
}

// Calls body(i) for all i in [0, n), up to `threads` at a time. What the lowest i throws is thrown. Not parallel_tasks:
// OpenMP ends the process where a thread finds no room to start.
void for_each_of(int64_t n, int threads, const std::function<void(int64_t)>& body) {
  std::mutex mutex;
  int64_t next = 0, end = n;
  std::exception_ptr failure;  // of `end`
  const auto work = [&] {
    std::unique_lock lock(mutex);
    while (next < end) {
      const int64_t i = next++;
      lock.unlock();
      std::exception_ptr thrown;
      try {
        body(i);
      } catch (...) {
        thrown = std::current_exception();
      }
      lock.lock();
      if (thrown && i < end) {
        failure = thrown;
        end = i;
      }
    }
  };
  {
    std::vector<std::jthread> helpers;
    // Where addresses are limited they are kept for the ranks' own threads (address_space.h).
    const int64_t most = address_space_left() == INT64_MAX ? std::min<int64_t>(n, threads) - 1 : 0;
    try {
      while (std::ssize(helpers) < most) helpers.emplace_back(work);
    } catch (const std::system_error&) {  // no more threads: those there are do it
    }
    work();
  }
  if (failure) std::rethrow_exception(failure);
}

// Calls body(trainer, context) on a rank of the dry device.
template <typename Body>
void on_dry_rank(const Config& config, const ResolvedSizes& sizes, int rank, RunKind kind, Body&& body) {
  Device device(DryRun{device_kind(config)});
  device.set_deterministic(config.training.deterministic);
  Arena arena(device);
  const Grid grid = grid_of(config, sizes);
  RankContext context(rank, grid, device, arena);
  make_groups(context, [&](std::vector<int> ranks, Dimension dimension) {
    const auto own = std::find(ranks.begin(), ranks.end(), rank);
    const int index = static_cast<int>(own - ranks.begin());
    return make_dry_communicator(dimension, index, std::move(ranks));
  });
  RankTrainer trainer(config, sizes, context, nullptr, kind);
  body(trainer, context);
}

}  // namespace

Grid grid_of(const Config& config, const ResolvedSizes& sizes) {
  return Grid({.tp = static_cast<int>(config.parallel.tensor_model_parallel_size),
               .cp = static_cast<int>(config.parallel.context_parallel_size),
               .dp = static_cast<int>(sizes.data_parallel_size),
               .pp = static_cast<int>(config.parallel.pipeline_model_parallel_size)},
              config.parallel.rank_order);
}

std::shared_ptr<const MemoryPlan> SharedPlans::shared(MemoryPlan recorded) {
  const std::lock_guard lock(mutex_);
  // The newest first: neighbouring ranks are the ones that are alike.
  const auto known =
      std::find_if(plans_.rbegin(), plans_.rend(), [&](const auto& plan) { return same_recording(*plan, recorded); });
  if (known != plans_.rend()) return *known;
  return plans_.emplace_back(std::make_shared<MemoryPlan>(std::move(recorded)));
}

void SharedPlans::lay_out(int threads) {
  for_each_of(std::ssize(plans_), threads, [&](int64_t i) { farspan::lay_out(*plans_[static_cast<size_t>(i)]); });
}

RankRecord record_rank(const Config& config, const ResolvedSizes& sizes, int rank, RunKind kind, SharedPlans* plans) {
  RankRecord record;
  on_dry_rank(config, sizes, rank, kind, [&](RankTrainer& trainer, RankContext& context) {
    if (kind == RunKind::train) {
      CostMeter meter(context);
      trainer.record_step([&] { record.micro_batch = meter.read(); });
      record.update = meter.read();
      divide(record.micro_batch, sizes.micro_batches / trainer.train_passes());
      trainer.record_state_visit();
    }
    if (kind == RunKind::evaluate || (kind == RunKind::train && config.training.eval_iters > 0))
      trainer.record_evaluation();
    if (kind == RunKind::generate) trainer.record_generation();
    if (plans != nullptr) record.memory = plans->shared(context.arena->recorded());
  });
  return record;
}

namespace {

// What a rank's shard decides: its update.
struct ShardUpdate {
  int rank = 0;
  MemoryPlan recorded;
  PhaseCost cost;
  bool like(const ShardUpdate& other) const { return cost == other.cost && same_recording(recorded, other.recorded); }
};

ShardUpdate shard_update(const Config& config, const ResolvedSizes& sizes, int rank) {
  ShardUpdate update;
  update.rank = rank;
  on_dry_rank(config, sizes, rank, RunKind::train, [&](RankTrainer& trainer, RankContext& context) {
    CostMeter meter(context);
    trainer.record_update();
    update.cost = meter.read();
    update.recorded = context.arena->recorded();
  });
  return update;
}

}  // namespace

std::vector<int> ranks_alike(const Config& config, const ResolvedSizes& sizes) {
  const int64_t tp = config.parallel.tensor_model_parallel_size;
  const bool equal_parts = config.model.vocab_size % tp == 0 && config.model.ffn_hidden_size % tp == 0;
  const bool equal_shards = tp == 1 || config.parallel.zero_stage == 0 || sizes.data_parallel_size == 1;
  const Grid grid = grid_of(config, sizes);
  using Place = std::array<int, 3>;               // along tp, cp, pp
  std::map<std::pair<Place, int>, int> first_at;  // and dp
  std::map<Place, std::vector<ShardUpdate>> updates;
  std::vector<int> alike;
  for (int rank = 0; rank < sizes.world_size; ++rank) {
    const Place place = {equal_parts ? 0 : grid.coordinate(rank, Dimension::tp), grid.coordinate(rank, Dimension::cp),
                         grid.coordinate(rank, Dimension::pp)};
    const auto [at, is_new] =
        first_at.try_emplace({place, equal_shards ? 0 : grid.coordinate(rank, Dimension::dp)}, rank);
    if (is_new && !equal_shards) {
      ShardUpdate own = shard_update(config, sizes, rank);
      std::vector<ShardUpdate>& known = updates[place];
      const auto same = std::find_if(known.begin(), known.end(), [&](const ShardUpdate& u) { return u.like(own); });
      if (same != known.end())
        at->second = same->rank;
      else
        known.push_back(std::move(own));
    }
    alike.push_back(at->second);
  }
  return alike;
}

std::vector<RankRecord> record_ranks(const Config& config, const ResolvedSizes& sizes, RunKind kind, int threads) {
  SharedPlans plans;
  const std::vector<int> alike = ranks_alike(config, sizes);
  std::vector<RankRecord> records(alike.size());
  std::vector<int> firsts;
  for (int rank = 0; rank < std::ssize(alike); ++rank)
    if (alike[static_cast<size_t>(rank)] == rank) firsts.push_back(rank);
  for_each_of(std::ssize(firsts), threads, [&](int64_t i) {
    const int rank = firsts[static_cast<size_t>(i)];
    records[static_cast<size_t>(rank)] = record_rank(config, sizes, rank, kind, &plans);
  });
  plans.lay_out(threads);
  for (size_t rank = 0; rank < records.size(); ++rank) records[rank] = records[static_cast<size_t>(alike[rank])];
  return records;
}

DeviceKind device_kind(const Config& config) {
  return config.training.device == DeviceChoice::cuda ? DeviceKind::cuda : DeviceKind::cpu;
}

int devices_of_machine(const Config& config, int ranks) {
  if (device_kind(config) == DeviceKind::cpu) return 1;
  const int gpus = cuda_device_count();
  return gpus > 0 ? gpus : std::max(1, ranks);
}

int64_t memory_limit_bytes(const Config& config) {
  if (config.memory.memory_limit > 0) return config.memory.memory_limit;
  if (device_kind(config) == DeviceKind::cpu) return available_memory_bytes();
  return cuda_device_count() > 0 ? cuda_free_bytes(0) - kLibraryBytes : kPlannedGpuBytes;
}

void check_fits(const Config& config, const std::vector<RankRecord>& records) {
  const size_t devices = static_cast<size_t>(devices_of_machine(config, static_cast<int>(records.size())));
  std::vector<int64_t> of_device(devices);
  const MemoryPlan* largest = records.front().memory.get();
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const MemoryPlan& memory = *records[rank].memory;
    of_device[rank % devices] += memory.peak_bytes;
    if (memory.peak_bytes > largest->peak_bytes) largest = &memory;
  }
  const int64_t total = *std::max_element(of_device.begin(), of_device.end());
  const int64_t limit = memory_limit_bytes(config);
  if (total <= limit) return;
  std::string parts;
  for (int i = 0; i < kPurposes; ++i) {
    const int64_t bytes = largest->by_purpose[static_cast<size_t>(i)];
    if (bytes > 0) parts += fmt::format("{}{} {}", parts.empty() ? "" : ", ", name_of(static_cast<Purpose>(i)), bytes);
  }
  throw MemoryError(fmt::format(
      "the plan needs {} bytes for {} ranks on this {}, the limit is {} ({}); the largest rank needs {}: {}. "
      "Smaller seq_length, micro_batch_size, mlp_tile_tokens or loss_tile_tokens, or recompute_granularity full, need "
      "less",
      total, devices == 1 ? records.size() : ceil_div(records.size(), devices),
      device_kind(config) == DeviceKind::cpu ? "machine" : "GPU", limit,
      config.memory.memory_limit > 0 ? "memory_limit" : "memory available now", largest->peak_bytes, parts));
}

}  // namespace farspan
