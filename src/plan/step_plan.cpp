// SPDX-License-Identifier: Apache-2.0
#include "plan/step_plan.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <map>
#include <utility>
#include <vector>

#include "base/math.h"
#include "config/names.h"
#include "model/flops.h"
#include "model/parameters.h"
#include "parallel/context/choose_cp_comm_type.h"
#include "train/attention_of_layers.h"

namespace farspan {
namespace {

constexpr double kBackwardShare = 2.0 / 3;  // of a micro-batch's compute: two matrix products for each forward one
constexpr size_t kMostRanksListed = 64;     // in the table to read; of more ranks equal ones share a line

const OpTotals& ops_of(const PhaseCost& cost, OpClass op_class) { return cost.ops[static_cast<size_t>(op_class)]; }

// Seconds of a phase on one rank: computing, attention's part of that, and receiving, by dimension.
struct PhaseTime {
  double compute = 0;
  double attention = 0;
  std::array<double, kDimensions> link{};
  double on(Dimension dimension) const { return link[static_cast<size_t>(dimension)]; }
  double data_parallel() const { return on(Dimension::dp) + on(Dimension::dp_cp) + on(Dimension::world); }
};

// Bytes per second that a rank receives on each dimension: the network's where its group is on several machines.
using LinkRates = std::array<double, kDimensions>;

LinkRates link_rates(const Grid& grid, int rank, const Machine& machine, const HostMap& hosts) {
  LinkRates rates{};
  for (int i = 0; i < kDimensions; ++i) {
    bool one_host = true;
    if (hosts.hosts() > 1) {
      const auto [first, last] = grid.ends_of_group(rank, static_cast<Dimension>(i));
      one_host = hosts.host_of(first) == hosts.host_of(last);  // hosts are runs of ranks
    }
    rates[static_cast<size_t>(i)] = one_host ? machine.link_bandwidth : machine.network_bandwidth;
  }
  return rates;
}

PhaseTime phase_time(const PhaseCost& cost, const Machine& machine, const LinkRates& rates) {
  PhaseTime time;
  time.attention = ops_of(cost, OpClass::attention).flops / machine.attention_flops;
  time.compute = ops_of(cost, OpClass::gemm).flops / machine.gemm_flops +
                 ops_of(cost, OpClass::gemm_fp8).flops / machine.fp8_gemm_flops + time.attention +
                 ops_of(cost, OpClass::memory).bytes / machine.memory_bandwidth;
  for (size_t i = 0; i < time.link.size(); ++i)
    time.link[i] = static_cast<double>(cost.traffic[i].bytes_received) / rates[i];
  return time;
}

// Layers by the way their keys and values travel, automatic resolved.
std::map<CpCommType, int64_t> layers_by_comm_type(const Config& config) {
  const SequenceLayout layout = sequence_layout_of(config);
  std::map<CpCommType, int64_t> layers;
  for (int64_t layer = 0; layer < config.model.num_layers; ++layer) ++layers[resolved_comm_type(config, layout, layer)];
  return layers;
}

// "p2p", or "all_gather x 4, p2p x 20" where layers differ.
std::string comm_types_text(const Config& config) {
  const std::map<CpCommType, int64_t> layers = layers_by_comm_type(config);
  if (layers.size() == 1) return std::string(choice_name(layers.begin()->first));
  std::vector<std::string> texts;
  for (const auto& [type, count] : layers) texts.push_back(fmt::format("{} x {}", choice_name(type), count));
  return fmt::format("{}", fmt::join(texts, ", "));
}

// How keys and values travel: the shares of the layers that have them go round a ring, and gathered in steps of some
// heads each; the rest hides nothing.
struct KeyTravel {
  double ring = 0;
  double gathered = 0;
  double gather_steps = 1;
  int ranks = 1;

  double exposed(double transfer, double attention) const {
    return ring * std::max(0.0, transfer - attention) +
           gathered * exposed_arrivals(transfer, attention, ranks, gather_steps) + (1 - ring - gathered) * transfer;
  }
};

KeyTravel key_travel(const Config& config) {
  std::map<CpCommType, int64_t> layers = layers_by_comm_type(config);
  const double count = static_cast<double>(config.model.num_layers);
  KeyTravel travel;
  travel.ranks = static_cast<int>(config.parallel.context_parallel_size);
  travel.ring = static_cast<double>(layers[CpCommType::p2p]) / count;
  if (!config.communication.cp_allgather_overlap) return travel;
  travel.gathered = static_cast<double>(layers[CpCommType::all_gather]) / count;
  if (travel.gathered == 0) return travel;
  const ContextAttentionShape shape =
      attention_shape(config.model, static_cast<int>(config.parallel.tensor_model_parallel_size), 0);
  const int64_t own_tokens = config.training.micro_batch_size * sequence_layout_of(config).local_length();
  const ScheduleSizes sizes =
      all_gather_sizes(own_tokens, travel.ranks, shape, compute_dtype(config.training.precision), Pass::backward,
                       {.buffer_size = config.communication.cp_allgather_buffer_size});
  travel.gather_steps = static_cast<double>(ceil_div(shape.kv_heads, sizes.heads));
  return travel;
}

// What a rank spends a micro-batch and a step, and how much of it waiting.
struct RankTime {
  double micro_batch = 0;
  double micro_batch_exposed = 0;
  double update = 0;
  double update_exposed = 0;
};

RankTime rank_time(const ParallelConfig& parallel, const KeyTravel& keys, const PhaseTime& micro,
                   const PhaseTime& update) {
  double hidden = 0;  // data-parallel seconds, of a micro-batch (ZeRO 2 and 3) and of the update alike
  if (parallel.overlap_grad_reduce) hidden += kBackwardShare * micro.compute;
  if (parallel.overlap_param_gather) hidden += (1 - kBackwardShare) * micro.compute;

  RankTime time;
  time.micro_batch_exposed = keys.exposed(micro.on(Dimension::cp), micro.attention) + micro.on(Dimension::tp) +
                             micro.on(Dimension::pp) + std::max(0.0, micro.data_parallel() - hidden);
  time.micro_batch = micro.compute + time.micro_batch_exposed;

  time.update_exposed = std::max(0.0, update.data_parallel() - hidden) + update.on(Dimension::cp) +
                        update.on(Dimension::tp) + update.on(Dimension::pp);
  time.update = update.compute + time.update_exposed;
  return time;
}

int64_t causal_pairs(int64_t S, int64_t window) {
  if (window <= 0 || window >= S) return S * (S + 1) / 2;
  return window * (window + 1) / 2 + (S - window) * window;
}

// Of a row, one layer; the mean over the layers where their windows differ.
int64_t causal_pairs(const Config& config) {
  double pairs = 0;
  for (int64_t window : config.model.window_size)
    pairs += static_cast<double>(causal_pairs(config.data.seq_length, window));
  return std::llround(pairs / static_cast<double>(config.model.window_size.size()));
}

void add(BytesByDimension& sum, const RankRecord& record, int64_t micro_batches) {
  for (size_t i = 0; i < sum.size(); ++i)
    sum[i] += micro_batches * record.micro_batch.traffic[i].bytes_received + record.update.traffic[i].bytes_received;
}

}  // namespace

BytesByDimension step_bytes(const Config& config, const ResolvedSizes& sizes) {
  const std::vector<int> like = ranks_alike(config, sizes);
  std::map<int, BytesByDimension> of_first;
  BytesByDimension bytes{};
  for (int first : like) {
    const auto [of_rank, is_new] = of_first.try_emplace(first);
    if (is_new) add(of_rank->second, record_rank(config, sizes, first, RunKind::train, nullptr), sizes.micro_batches);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] += of_rank->second[i];
  }
  return bytes;
}

StepPlan plan_step(const Job& job, const Machine& machine, const HostMap& hosts) {
  StepPlan plan;
  const Config& config = job.config;
  const Grid grid = grid_of(config, job.sizes);
  const double micro_batches = static_cast<double>(job.sizes.micro_batches);
  const KeyTravel keys = key_travel(config);
  // By machine, and by each of a machine's devices.
  const int64_t devices = devices_of_machine(config, static_cast<int>(hosts.end_rank(0)));
  std::vector<int64_t> device_bytes(static_cast<size_t>(hosts.hosts() * devices));
  double slowest_micro_batch = 0;
  for (size_t rank = 0; rank < job.records.size(); ++rank) {
    const RankRecord& record = job.records[rank];
    const LinkRates rates = link_rates(grid, static_cast<int>(rank), machine, hosts);
    const RankTime time = rank_time(config.parallel, keys, phase_time(record.micro_batch, machine, rates),
                                    phase_time(record.update, machine, rates));
    slowest_micro_batch = std::max(slowest_micro_batch, time.micro_batch);
    plan.seconds = std::max(plan.seconds, micro_batches * time.micro_batch + time.update);
    plan.exposed_communication_seconds =
        std::max(plan.exposed_communication_seconds, micro_batches * time.micro_batch_exposed + time.update_exposed);
    add(plan.bytes, record, job.sizes.micro_batches);
    const int64_t host = hosts.host_of(static_cast<int64_t>(rank));
    const int64_t device = (static_cast<int64_t>(rank) - hosts.first_rank(host)) % devices;
    device_bytes[static_cast<size_t>(host * devices + device)] += record.memory->peak_bytes;
  }
  plan.pipeline_idle_seconds = static_cast<double>(config.parallel.pipeline_model_parallel_size - 1) /
                               static_cast<double>(job.sizes.pipeline_chunks) * slowest_micro_batch;
  plan.seconds += plan.pipeline_idle_seconds;
  const int64_t rows = config.training.global_batch_size;
  plan.model_flops = model_flops(config.model, rows * config.data.seq_length, rows * causal_pairs(config));
  const auto fullest = std::max_element(device_bytes.begin(), device_bytes.end());
  plan.fullest_host = (fullest - device_bytes.begin()) / devices;
  plan.total_bytes = *fullest;
  plan.limit_bytes = memory_limit_bytes(config);
  plan.fits = plan.total_bytes <= plan.limit_bytes;
  return plan;
}

namespace {

std::string mfu_text(const Machine& machine, const StepPlan& plan, int64_t ranks) {
  if (machine.peak_flops <= 0 || plan.seconds <= 0) return "null";
  return fmt::format("{:.17g}", plan.model_flops / plan.seconds / (machine.peak_flops * static_cast<double>(ranks)));
}

// Gradient sums run over dp x cp; the contract's "dp" is what data parallelism costs.
int64_t bytes_of(const StepPlan& plan, Dimension dimension) { return plan.bytes[static_cast<size_t>(dimension)]; }

}  // namespace

std::string plan_json(const Job& job, const Machine& machine, const HostMap& hosts, const StepPlan& plan) {
  std::string text = fmt::format("{{\"fits\":{},\"ranks\":[", plan.fits);
  for (size_t rank = 0; rank < job.records.size(); ++rank) {
    const MemoryPlan& memory = *job.records[rank].memory;
    text +=
        fmt::format("{}{{\"rank\":{},\"peak_bytes\":{},\"by_purpose\":{{", rank ? "," : "", rank, memory.peak_bytes);
    for (int i = 0; i < kPurposes; ++i)
      text += fmt::format("{}\"{}\":{}", i ? "," : "", farspan::name_of(static_cast<Purpose>(i)),
                          memory.by_purpose[static_cast<size_t>(i)]);
    text += "}}";
  }
  text += fmt::format(
      "],\"step\":{{\"seconds\":{:.17g},\"model_flops\":{:.17g},\"mfu\":{},\"exposed_communication_seconds\":{:.17g},"
      "\"pipeline_idle_seconds\":{:.17g},\"bytes\":{{\"tp\":{},\"cp\":{},\"dp\":{},\"pp\":{}}}}},",
      plan.seconds, plan.model_flops, mfu_text(machine, plan, job.sizes.world_size), plan.exposed_communication_seconds,
      plan.pipeline_idle_seconds, bytes_of(plan, Dimension::tp), bytes_of(plan, Dimension::cp),
      bytes_of(plan, Dimension::dp) + bytes_of(plan, Dimension::dp_cp), bytes_of(plan, Dimension::pp));
  text += fmt::format(
      "\"assumptions\":{{\"device\":\"{}\",\"gemm_flops_per_second\":{:.17g},\"attention_flops_per_second\":{:.17g},"
      "\"memory_bytes_per_second\":{:.17g},\"link_bytes_per_second\":{:.17g},\"network_bytes_per_second\":{:.17g},"
      "\"hosts\":{},\"cp_comm_type\":\"{}\",\"documents_per_row\":1,\"micro_batches\":{},\"pipeline_chunks\":{},"
      "\"total_bytes\":{},\"memory_limit_bytes\":{}}}}}\n",
      machine.name, machine.gemm_flops, machine.attention_flops, machine.memory_bandwidth, machine.link_bandwidth,
      machine.network_bandwidth, hosts.hosts(), comm_types_text(job.config), job.sizes.micro_batches,
      job.sizes.pipeline_chunks, plan.total_bytes, plan.limit_bytes);
  return text;
}

namespace {

double mib(int64_t bytes) { return static_cast<double>(bytes) / (1024.0 * 1024.0); }

// One line a rank; of many ranks one line for all that are equal, named by the first and how many more there are.
std::string memory_text(const std::vector<RankRecord>& records) {
  std::string text = "\nmemory at the peak, MiB\n  rank             peak";
  for (int i = 0; i < kPurposes; ++i) text += fmt::format("  {:>13}", farspan::name_of(static_cast<Purpose>(i)));
  text += "\n";
  std::map<std::pair<int64_t, BytesByPurpose>, std::pair<size_t, int64_t>> lines;  // first rank, ranks
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const MemoryPlan& memory = *records[rank].memory;
    ++lines.try_emplace({memory.peak_bytes, memory.by_purpose}, rank, 0).first->second.second;
  }
  const bool every = records.size() <= kMostRanksListed;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const MemoryPlan& memory = *records[rank].memory;
    const auto& [first, ranks] = lines.at({memory.peak_bytes, memory.by_purpose});
    if (!every && first != rank) continue;
    const std::string name = every || ranks == 1 ? fmt::format("{}", rank) : fmt::format("{} +{}", rank, ranks - 1);
    text += fmt::format("  {:<9}  {:>10.2f}", name, mib(memory.peak_bytes));
    for (int64_t bytes : memory.by_purpose) text += fmt::format("  {:>13.2f}", mib(bytes));
    text += "\n";
  }
  return text;
}

}  // namespace

std::string plan_text(const Job& job, const Machine& machine, const HostMap& hosts, const StepPlan& plan) {
  const Config& config = job.config;
  const ParallelConfig& parallel = config.parallel;
  std::string text = fmt::format(
      "{} parameters, {} ranks (tp {}; cp {}, {}; pp {}; dp {}, ZeRO {}), {} micro-batches of {} rows of {} tokens "
      "each "
      "step\n",
      ParameterTable(config.model).parameter_count(), job.sizes.world_size, parallel.tensor_model_parallel_size,
      parallel.context_parallel_size, comm_types_text(config), parallel.pipeline_model_parallel_size,
      job.sizes.data_parallel_size, parallel.zero_stage, job.sizes.micro_batches, config.training.micro_batch_size,
      config.data.seq_length);
  text += memory_text(job.records);
  text += fmt::format("  {:<9}  {:>10.2f}  of {:.2f} there are: {}\n",
                      hosts.hosts() == 1 ? std::string("all") : fmt::format("host {}", plan.fullest_host),
                      mib(plan.total_bytes), mib(plan.limit_bytes), plan.fits ? "fits" : "does not fit");
  text += "\nbytes received in a step, all ranks together\n";
  for (int i = 0; i < kDimensions; ++i)
    if (plan.bytes[static_cast<size_t>(i)] > 0)
      text +=
          fmt::format("  {:<6} {}\n", farspan::name_of(static_cast<Dimension>(i)), plan.bytes[static_cast<size_t>(i)]);
  text += fmt::format(
      "\nstep about {:.3g} s, of it {:.3g} s waiting for communication and {:.3g} s for the pipeline to fill and "
      "drain; "
      "{:.3g} model TFLOP\n"
      "assumed of each rank: GEMM {:.3g} GFLOP/s, attention {:.3g} GFLOP/s, memory {:.3g} GB/s, link {:.3g} GB/s",
      plan.seconds, plan.exposed_communication_seconds, plan.pipeline_idle_seconds, plan.model_flops / 1e12,
      machine.gemm_flops / 1e9, machine.attention_flops / 1e9, machine.memory_bandwidth / 1e9,
      machine.link_bandwidth / 1e9);
  if (hosts.hosts() > 1)
    text += fmt::format(", {:.3g} GB/s from another of {} machines", machine.network_bandwidth / 1e9, hosts.hosts());
  text += "; one document a row\nassumed to hide: p2p behind attention, all_gather but for its first heads";
  if (parallel.overlap_grad_reduce) text += ", gradient sums behind backward";
  if (parallel.overlap_param_gather) text += ", weight gathers behind forward";
  return text + "; nothing else\n";
}

}  // namespace farspan
