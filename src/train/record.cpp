// SPDX-License-Identifier: Apache-2.0
#include "train/record.h"

#include <algorithm>
#include <map>

#include "base/math.h"
#include "comm/dry/dry_communicator.h"

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

// Runs `body` and returns what it cost.
template <typename Body>
PhaseCost measure(RankContext& context, Body&& body) {
  OpSum sum;
  context.device->observe(&sum);
  context.reset_traffic();
  body();
  context.device->observe(nullptr);
  PhaseCost cost;
  cost.ops = sum.ops;
  for (size_t i = 0; i < cost.traffic.size(); ++i) cost.traffic[i] = context.traffic(static_cast<Dimension>(i));
  return cost;
}

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

}  // namespace

Grid grid_of(const Config& config, const ResolvedSizes& sizes) {
  return Grid({.tp = static_cast<int>(config.parallel.tensor_model_parallel_size),
               .cp = static_cast<int>(config.parallel.context_parallel_size),
               .dp = static_cast<int>(sizes.data_parallel_size),
               .pp = static_cast<int>(config.parallel.pipeline_model_parallel_size)},
              config.parallel.rank_order);
}

RankRecord record_rank(const Config& config, const ResolvedSizes& sizes, int rank, RunKind kind) {
  Device device(DryRun{device_kind(config)});
  device.set_deterministic(config.training.deterministic);
  Arena arena(device);
  const Grid grid = grid_of(config, sizes);
  RankContext context(rank, grid, device, arena);
  make_groups(context, [&](std::vector<int> ranks, Dimension dimension) {
    int index = 0;
    while (ranks[static_cast<size_t>(index)] != rank) ++index;
    return make_dry_communicator(dimension, index, std::move(ranks));
  });
  RankRecord record;
  {
    RankTrainer trainer(config, sizes, context, nullptr, kind);
    if (kind == RunKind::train) {
      record.micro_batch = measure(context, [&] { trainer.record_pass(); });
      divide(record.micro_batch, sizes.micro_batches / trainer.train_passes());
      record.update = measure(context, [&] { trainer.record_update(); });
      trainer.record_state_visit();
    }
    if (kind == RunKind::evaluate || (kind == RunKind::train && config.training.eval_iters > 0))
      trainer.record_evaluation();
    if (kind == RunKind::generate) trainer.record_generation();
    record.memory = arena.plan();
  }
  return record;
}

std::vector<int> ranks_alike(const Config& config, const ResolvedSizes& sizes) {
  const int64_t tp = config.parallel.tensor_model_parallel_size;
  const bool equal_parts = config.model.vocab_size % tp == 0 && config.model.ffn_hidden_size % tp == 0;
  const bool equal_shards = tp == 1 || config.parallel.zero_stage == 0;
  const Grid grid = grid_of(config, sizes);
  std::map<std::array<int, 4>, int> first_at;
  std::vector<int> alike;
  for (int rank = 0; rank < sizes.world_size; ++rank) {
    const std::array<int, 4> place = {equal_parts ? 0 : grid.coordinate(rank, Dimension::tp),
                                      grid.coordinate(rank, Dimension::cp), grid.coordinate(rank, Dimension::pp),
                                      equal_shards ? 0 : grid.coordinate(rank, Dimension::dp)};
    alike.push_back(first_at.emplace(place, rank).first->second);
  }
  return alike;
}

std::vector<RankRecord> record_ranks(const Config& config, const ResolvedSizes& sizes, RunKind kind) {
  std::vector<RankRecord> records;
  for (int first : ranks_alike(config, sizes))
    records.push_back(first == std::ssize(records) ? record_rank(config, sizes, first, kind)
                                                   : records[static_cast<size_t>(first)]);
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
  const MemoryPlan* largest = &records.front().memory;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const MemoryPlan& memory = records[rank].memory;
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
