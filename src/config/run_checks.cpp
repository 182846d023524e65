// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "config/checks.h"
#include "config/names.h"
#include "config/value_text.h"

namespace farspan {
namespace {

// One weight, or two: "95,5". The training part's must be above 0.
void check_split(const std::string& split, Reasons& reasons) {
  std::vector<double> weights;
  bool good = true;
  try {
    for (const std::string& part : split_commas(split)) weights.push_back(read_real(part));
  } catch (const ValueError&) {
    good = false;
  }
  good = good && (weights.size() == 1 || weights.size() == 2) && weights[0] > 0 && weights.back() >= 0;
  if (!good) {
    reasons.add("split \"{}\" must be the weights of the training and the held-out part, such as 95,5 or 100,0", split);
  }
}

int64_t check_batches(const TrainingConfig& training, const ResolvedSizes& sizes, Reasons& reasons) {
  const bool micro_fits = size_fits("micro_batch_size", training.micro_batch_size, 1, reasons);
  const bool global_fits = size_fits("global_batch_size", training.global_batch_size, 0, reasons);
  if (!micro_fits || !global_fits) return 1;
  const int64_t rows_at_once = training.micro_batch_size * sizes.data_parallel_size;
  if (rows_at_once > kLargestSize) {
    reasons.add("micro_batch_size {} * data-parallel size {} is too large; use at most {} rows",
                training.micro_batch_size, sizes.data_parallel_size, kLargestSize);
    return 1;
  }
  if (training.global_batch_size % rows_at_once == 0)
    return std::max<int64_t>(training.global_batch_size / rows_at_once, 1);

  std::string works =
      fmt::format("use global_batch_size {}", either(multiples_near(training.global_batch_size, rows_at_once)));
  if (training.global_batch_size % sizes.data_parallel_size == 0) {
    const int64_t rows_of_rank = training.global_batch_size / sizes.data_parallel_size;
    works += fmt::format(", or micro_batch_size {}", either(divisors_near(rows_of_rank, training.micro_batch_size)));
  }
  reasons.add("global_batch_size {} is not a multiple of micro_batch_size {} * data-parallel size {}; {}",
              training.global_batch_size, training.micro_batch_size, sizes.data_parallel_size, works);
  return 1;
}

// Whether `split` leaves rows to evaluate on; true for a split that cannot be read, which has its own reason.
bool holds_out(const std::string& split) {
  const std::vector<std::string> parts = split_commas(split);
  try {
    return parts.size() != 1 && (parts.size() != 2 || read_real(parts[1]) != 0);
  } catch (const ValueError&) {
    return true;
  }
}

void check_training(const TrainingConfig& training, const DataConfig& data, Reasons& reasons) {
  size_fits("train_iters", training.train_iters, 0, reasons);
  if (training.seed < 0) reasons.add("seed {} is negative; use 0 or more", training.seed);
  const bool interval_fits = size_fits("eval_interval", training.eval_interval, 0, reasons);
  size_fits("eval_iters", training.eval_iters, 0, reasons);
  if (interval_fits && training.eval_interval > 0 && training.eval_iters == 0) {
    reasons.add("eval_interval {} does nothing with eval_iters 0; use eval_iters 1 or more, or eval_interval 0",
                training.eval_interval);
  }
  if (interval_fits && training.eval_interval > 0 && !holds_out(data.split)) {
    reasons.add(
        "eval_interval {} does nothing with split \"{}\", which holds no rows out; use a split such as 95,5, or "
        "eval_interval 0",
        training.eval_interval, data.split);
  }
  size_fits("log_interval", training.log_interval, 1, reasons);
}

void check_optimizer(const OptimizerConfig& optimizer, Reasons& reasons) {
  check_not_negative("lr", optimizer.lr, reasons);
  check_not_negative("min_lr", optimizer.min_lr, reasons);
  if (optimizer.lr >= 0 && optimizer.min_lr > optimizer.lr) {
    reasons.add("min_lr {} is above lr {}; use at most {}", optimizer.min_lr, optimizer.lr, optimizer.lr);
  }
  const bool warmup_fits = size_fits("lr_warmup_iters", optimizer.lr_warmup_iters, 0, reasons);
  const bool decay_fits = size_fits("lr_decay_iters", optimizer.lr_decay_iters, 0, reasons);
  if (warmup_fits && decay_fits && optimizer.lr_decay_iters > 0 &&
      optimizer.lr_warmup_iters > optimizer.lr_decay_iters) {
    reasons.add("lr_warmup_iters {} is more than lr_decay_iters {}, of which it is part; use {} or less",
                optimizer.lr_warmup_iters, optimizer.lr_decay_iters, optimizer.lr_decay_iters);
  }
  check_not_negative("weight_decay", optimizer.weight_decay, reasons);
  check_fraction("adam_beta1", optimizer.adam_beta1, "0.9", reasons);
  check_fraction("adam_beta2", optimizer.adam_beta2, "0.95", reasons);
  check_positive("adam_eps", optimizer.adam_eps, reasons);
  check_not_negative("clip_grad", optimizer.clip_grad, reasons);
}

void check_memory(const MemoryConfig& memory, Reasons& reasons) {
  constexpr std::array<std::string_view, 4> kModules = {"layernorm", "qkv", "attn_proj", "mlp"};
  for (const std::string& module : memory.recompute_modules) {
    if (std::find(kModules.begin(), kModules.end(), module) != kModules.end()) continue;
    reasons.add("recompute_modules names \"{}\"; use any of {}", module, fmt::join(kModules, ", "));
  }
  if (!memory.recompute_modules.empty() && memory.recompute_granularity != Recompute::selective) {
    reasons.add("recompute_modules does nothing with recompute_granularity {}; use selective, or leave the modules out",
                choice_name(memory.recompute_granularity));
  }
  size_fits("mlp_tile_tokens", memory.mlp_tile_tokens, 0, reasons);
  size_fits("loss_tile_tokens", memory.loss_tile_tokens, 0, reasons);
  if (memory.memory_limit < 0)
    reasons.add("memory_limit {} is negative; use bytes, or 0 for no limit", memory.memory_limit);
}

void check_communication(const CommunicationConfig& communication, DeviceChoice device, Reasons& reasons) {
  if (communication.backend == Backend::nccl && device == DeviceChoice::cpu)
    reasons.add("communication.backend nccl carries tensors between GPUs, but device is cpu; use threads, mpi or auto");
  check_positive("distributed_timeout_seconds", communication.distributed_timeout_seconds, reasons);
  if (communication.cp_allgather_buffer_size < 0) {
    reasons.add("cp_allgather.buffer_size {} is negative; use bytes, or 0 for no limit",
                communication.cp_allgather_buffer_size);
  }
}

void check_output(const OutputConfig& output, Reasons& reasons) {
  size_fits("save_interval", output.save_interval, 0, reasons);
  size_fits("keep", output.keep, 0, reasons);
  if (output.load_weights_only && output.load.empty()) {
    reasons.add("load_weights_only true does nothing without load; name a checkpoint in load, or use false");
  }
}

}  // namespace

void check_run(const Config& config, ResolvedSizes& sizes, Reasons& reasons) {
  size_fits("seq_length", config.data.seq_length, 2, reasons);
  check_split(config.data.split, reasons);
  check_training(config.training, config.data, reasons);
  sizes.micro_batches = check_batches(config.training, sizes, reasons);
  check_optimizer(config.optimizer, reasons);
  check_memory(config.memory, reasons);
  check_communication(config.communication, config.training.device, reasons);
  check_output(config.output, reasons);
}

}  // namespace farspan
