// SPDX-License-Identifier: Apache-2.0
#include "plan/step_plan.h"

#include <algorithm>
#include <fmt/format.h>

#include "model/flops.h"
#include "model/parameters.h"

namespace farspan {
namespace {

struct RankTime {
  double compute = 0;
  double attention = 0;
  double cp = 0;
  double other_communication = 0;
};

const OpTotals& ops_of(const PhaseCost& cost, OpClass op_class) { return cost.ops[static_cast<size_t>(op_class)]; }

const Traffic& traffic_of(const PhaseCost& cost, Dimension dimension) {
  return cost.traffic[static_cast<size_t>(dimension)];
}

RankTime phase_time(const PhaseCost& cost, const Machine& machine) {
  RankTime time;
  time.attention = ops_of(cost, OpClass::attention).flops / machine.attention_flops;
  time.compute = ops_of(cost, OpClass::gemm).flops / machine.gemm_flops + time.attention +
                 ops_of(cost, OpClass::memory).bytes / machine.memory_bandwidth;
  for (int i = 0; i < kDimensions; ++i) {
    const Dimension dimension = static_cast<Dimension>(i);
    const double seconds = static_cast<double>(traffic_of(cost, dimension).bytes_received) / machine.link_bandwidth;
    (dimension == Dimension::cp ? time.cp : time.other_communication) += seconds;
  }
  return time;
}

CpCommType comm_type(const Config& config) {
  const SequenceLayout layout(config.parallel.cp_layout, config.data.seq_length,
                              static_cast<int>(config.parallel.context_parallel_size));
  const ContextAttentionShape shape = {.heads = config.model.num_attention_heads,
                                       .kv_heads = config.model.num_query_groups,
                                       .head_dim = config.model.kv_channels,
                                       .scale = static_cast<float>(config.model.softmax_scale)};
  return choose_cp_comm_type(config.parallel.cp_comm_type, layout, shape,
                             config.training.precision == Precision::fp32 ? DType::f32 : DType::bf16);
}

std::string_view name_of(CpCommType type) { return type == CpCommType::p2p ? "p2p" : "all_gather"; }

int64_t causal_pairs(int64_t S, int64_t window) {
  if (window <= 0 || window >= S) return S * (S + 1) / 2;
  return window * (window + 1) / 2 + (S - window) * window;
}

}  // namespace

StepPlan plan_step(const Job& job, const Machine& machine) {
  StepPlan plan;
  const Config& config = job.config;
  const double micro_batches = static_cast<double>(job.sizes.micro_batches);
  const bool overlaps = comm_type(config) == CpCommType::p2p;
  for (const RankRecord& record : job.records) {
    const RankTime micro = phase_time(record.micro_batch, machine);
    const RankTime update = phase_time(record.update, machine);
    const double cp_exposed = overlaps ? std::max(0.0, micro.cp - micro.attention) : micro.cp;
    const double exposed =
        micro_batches * (cp_exposed + micro.other_communication) + update.cp + update.other_communication;
    const double seconds = micro_batches * micro.compute + update.compute + exposed;
    plan.seconds = std::max(plan.seconds, seconds);
    plan.exposed_communication_seconds = std::max(plan.exposed_communication_seconds, exposed);
    for (size_t i = 0; i < plan.bytes.size(); ++i)
      plan.bytes[i] += job.sizes.micro_batches * record.micro_batch.traffic[i].bytes_received +
                       record.update.traffic[i].bytes_received;
    plan.total_bytes += record.memory.peak_bytes;
  }
  const int64_t rows = config.training.global_batch_size;
  plan.model_flops = model_flops(config.model, rows * config.data.seq_length,
                                 rows * causal_pairs(config.data.seq_length, config.model.window_size));
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

std::string plan_json(const Job& job, const Machine& machine, const StepPlan& plan) {
  std::string text = fmt::format("{{\"fits\":{},\"ranks\":[", plan.fits);
  for (size_t rank = 0; rank < job.records.size(); ++rank) {
    const MemoryPlan& memory = job.records[rank].memory;
    text +=
        fmt::format("{}{{\"rank\":{},\"peak_bytes\":{},\"by_purpose\":{{", rank ? "," : "", rank, memory.peak_bytes);
    for (int i = 0; i < kPurposes; ++i)
      text += fmt::format("{}\"{}\":{}", i ? "," : "", farspan::name_of(static_cast<Purpose>(i)),
                          memory.by_purpose[static_cast<size_t>(i)]);
    text += "}}";
  }
  text += fmt::format(
      "],\"step\":{{\"seconds\":{:.17g},\"model_flops\":{:.17g},\"mfu\":{},\"exposed_communication_seconds\":{:.17g},"
      "\"bytes\":{{\"tp\":{},\"cp\":{},\"dp\":{},\"pp\":{}}}}},",
      plan.seconds, plan.model_flops, mfu_text(machine, plan, job.sizes.world_size), plan.exposed_communication_seconds,
      bytes_of(plan, Dimension::tp), bytes_of(plan, Dimension::cp),
      bytes_of(plan, Dimension::dp) + bytes_of(plan, Dimension::dp_cp), bytes_of(plan, Dimension::pp));
  text += fmt::format(
      "\"assumptions\":{{\"device\":\"{}\",\"gemm_flops_per_second\":{:.17g},\"attention_flops_per_second\":{:.17g},"
      "\"memory_bytes_per_second\":{:.17g},\"link_bytes_per_second\":{:.17g},\"cp_comm_type\":\"{}\","
      "\"documents_per_row\":1,\"micro_batches\":{},\"total_bytes\":{},\"memory_limit_bytes\":{}}}}}\n",
      machine.name, machine.gemm_flops, machine.attention_flops, machine.memory_bandwidth, machine.link_bandwidth,
      name_of(comm_type(job.config)), job.sizes.micro_batches, plan.total_bytes, plan.limit_bytes);
  return text;
}

std::string plan_text(const Job& job, const Machine& machine, const StepPlan& plan) {
  const Config& config = job.config;
  std::string text =
      fmt::format("{} parameters, {} ranks (cp {}, {}; dp {}), {} micro-batches of {} rows of {} tokens each step\n",
                  ParameterTable(config.model).parameter_count(), job.sizes.world_size,
                  config.parallel.context_parallel_size, name_of(comm_type(config)), job.sizes.data_parallel_size,
                  job.sizes.micro_batches, config.training.micro_batch_size, config.data.seq_length);
  const auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / (1024.0 * 1024.0); };
  text += "\nmemory at the peak, MiB\n  rank        peak";
  for (int i = 0; i < kPurposes; ++i) text += fmt::format("  {:>13}", farspan::name_of(static_cast<Purpose>(i)));
  text += "\n";
  for (size_t rank = 0; rank < job.records.size(); ++rank) {
    const MemoryPlan& memory = job.records[rank].memory;
    text += fmt::format("  {:>4}  {:>10.2f}", rank, mib(memory.peak_bytes));
    for (int64_t bytes : memory.by_purpose) text += fmt::format("  {:>13.2f}", mib(bytes));
    text += "\n";
  }
  text += fmt::format("  all   {:>10.2f}  of {:.2f} there are: {}\n", mib(plan.total_bytes), mib(plan.limit_bytes),
                      plan.fits ? "fits" : "does not fit");
  text += "\nbytes received in a step, all ranks together\n";
  for (int i = 0; i < kDimensions; ++i)
    if (plan.bytes[static_cast<size_t>(i)] > 0)
      text +=
          fmt::format("  {:<6} {}\n", farspan::name_of(static_cast<Dimension>(i)), plan.bytes[static_cast<size_t>(i)]);
  text += fmt::format(
      "\nstep about {:.3g} s, of it {:.3g} s waiting for communication; {:.3g} model TFLOP\n"
      "assumed of each rank: GEMM {:.3g} GFLOP/s, attention {:.3g} GFLOP/s, memory {:.3g} GB/s, link {:.3g} GB/s; one "
      "document a row\n",
      plan.seconds, plan.exposed_communication_seconds, plan.model_flops / 1e12, machine.gemm_flops / 1e9,
      machine.attention_flops / 1e9, machine.memory_bandwidth / 1e9, machine.link_bandwidth / 1e9);
  return text;
}

}  // namespace farspan
