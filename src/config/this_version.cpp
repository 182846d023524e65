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
  if (communication.reduce_scatter_use_ring) absent(reasons, "reduce_scatter.use_ring", true, "false");
}

}  // namespace

void refuse_absent_features(const Config& config, Reasons& reasons) {
  refuse_data(config.data, reasons);
  refuse_memory(config.memory, reasons);
  refuse_communication(config.communication, reasons);
  if (config.output.tensorboard) absent(reasons, "tensorboard", true, "false (metrics.jsonl holds the same numbers)");
}

}  // namespace farspan
