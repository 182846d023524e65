// SPDX-License-Identifier: Apache-2.0
#include "config/this_version.h"

#include <string_view>

#include "config/names.h"

namespace farspan {
namespace {

template <typename Value>
void absent(Reasons& reasons, std::string_view key, const Value& found, std::string_view works) {
  reasons.add("{} {} is not in this version; use {}", key, found, works);
}

void refuse_parallel(const ParallelConfig& parallel, Reasons& reasons) {
  if (parallel.tensor_model_parallel_size > 1) {
    absent(reasons, "tensor_model_parallel_size", parallel.tensor_model_parallel_size,
           "1, and context_parallel_size to use more ranks");
  }
  if (parallel.pipeline_model_parallel_size > 1) {
    absent(reasons, "pipeline_model_parallel_size", parallel.pipeline_model_parallel_size,
           "1, and context_parallel_size to use more ranks");
  }
  if (parallel.sequence_parallel) absent(reasons, "sequence_parallel", true, "false");
  if (parallel.num_layers_per_virtual_pipeline_stage > 0) {
    absent(reasons, "num_layers_per_virtual_pipeline_stage", parallel.num_layers_per_virtual_pipeline_stage, "0");
  }
  if (parallel.zero_stage > 0) absent(reasons, "zero_stage", parallel.zero_stage, "0");
  if (parallel.overlap_grad_reduce) absent(reasons, "overlap_grad_reduce", true, "false");
  if (parallel.overlap_param_gather) absent(reasons, "overlap_param_gather", true, "false");
  if (parallel.cp_comm_type == CpCommType::a2a || parallel.cp_comm_type == CpCommType::a2a_p2p) {
    absent(reasons, "cp_comm_type", choice_name(parallel.cp_comm_type), "p2p, all_gather or auto");
  }
  if (!parallel.hierarchical_context_parallel_sizes.empty()) {
    absent(reasons, "hierarchical_context_parallel_sizes",
           fmt::format("[{}]", fmt::join(parallel.hierarchical_context_parallel_sizes, ", ")), "[]");
  }
  if (parallel.cp_layout == CpLayout::balanced) absent(reasons, "cp_layout", "balanced", "zigzag or contiguous");
}

// Probabilities in (0, 1); others are refused as no probabilities.
void refuse_dropout(std::string_view key, double probability, Reasons& reasons) {
  if (probability > 0 && probability < 1) absent(reasons, key, probability, "0");
}

void refuse_data(const DataConfig& data, Reasons& reasons) {
  if (data.format != DataFormat::text && data.format != DataFormat::fasta) {
    absent(reasons, "data.format", choice_name(data.format), "text or fasta");
  }
  if (data.tokenizer != "byte" && data.tokenizer != "dna") {
    reasons.add("tokenizer \"{}\": tokenizer files are not in this version; use byte or dna", data.tokenizer);
  }
}

void refuse_memory(const MemoryConfig& memory, Reasons& reasons) {
  if (memory.recompute_granularity == Recompute::automatic) {
    absent(reasons, "recompute_granularity", "auto", "none, selective or full");
  }
  if (memory.cpu_offload_activations) absent(reasons, "cpu_offload_activations", true, "false");
  if (memory.optimizer_cpu_offload) absent(reasons, "optimizer_cpu_offload", true, "false");
}

void refuse_communication(const CommunicationConfig& communication, Reasons& reasons) {
  if (communication.backend == Backend::mpi || communication.backend == Backend::nccl) {
    absent(reasons, "communication.backend", choice_name(communication.backend), "threads or auto");
  }
  const CommunicationConfig defaults;
  if (communication.cp_allgather_overlap != defaults.cp_allgather_overlap) {
    absent(reasons, "cp_allgather.overlap", communication.cp_allgather_overlap, "true");
  }
  if (communication.cp_allgather_buffer_size > 0) {
    absent(reasons, "cp_allgather.buffer_size", communication.cp_allgather_buffer_size, "0");
  }
  if (communication.reduce_scatter_use_ring) absent(reasons, "reduce_scatter.use_ring", true, "false");
}

}  // namespace

void refuse_absent_features(const Config& config, Reasons& reasons) {
  refuse_parallel(config.parallel, reasons);
  refuse_dropout("attention_dropout", config.model.attention_dropout, reasons);
  refuse_dropout("hidden_dropout", config.model.hidden_dropout, reasons);
  refuse_data(config.data, reasons);
  if (config.training.precision == Precision::fp8) absent(reasons, "precision", "fp8", "bf16 or fp32");
  if (config.training.device == DeviceChoice::cuda) absent(reasons, "device", "cuda", "cpu or auto");
  refuse_memory(config.memory, reasons);
  refuse_communication(config.communication, reasons);
  if (config.output.tensorboard) absent(reasons, "tensorboard", true, "false (metrics.jsonl holds the same numbers)");
  if (config.output.trace) absent(reasons, "trace", true, "false");
}

}  // namespace farspan
