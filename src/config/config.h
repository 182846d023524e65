// SPDX-License-Identifier: Apache-2.0
// The typed configuration of a run. Field names are the YAML keys and, with dashes, the command-line flags;
// Megatron-LM's names where it has one. Defaults stand here and nowhere else; config/keys.cpp lists every key once
// (section, help, how it is read), config/validate.cpp says what fits together.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace farspan {

enum class RopeScalingType { none, linear, ntk, yarn, llama3 };

struct RopeScalingConfig {
  RopeScalingType type = RopeScalingType::none;
  double factor = 1.0;
  double low_freq_factor = 1.0;                     // llama3
  double high_freq_factor = 4.0;                    // llama3
  int64_t original_max_position_embeddings = 8192;  // llama3, yarn
  double beta_fast = 32.0;                          // yarn
  double beta_slow = 1.0;                           // yarn
};

struct ModelConfig {
  std::string preset;  // empty: sizes are given one by one
  int64_t num_layers = 2;
  int64_t hidden_size = 128;
  int64_t ffn_hidden_size = 0;  // 0: 8/3 hidden_size, rounded up to a multiple of 64
  int64_t num_attention_heads = 4;
  int64_t num_query_groups = 0;  // key/value heads; 0: num_attention_heads
  int64_t kv_channels = 0;       // head size; 0: hidden_size / num_attention_heads
  int64_t vocab_size = 0;        // 0: the tokenizer's
  double rotary_base = 10000.0;
  bool rotary_interleaved = false;
  RopeScalingConfig rope_scaling;
  double norm_epsilon = 1e-5;
  bool untie_embeddings_and_output_weights = false;
  bool qk_layernorm = false;
  bool add_qkv_bias = false;
  std::vector<int64_t> window_size = {0};  // keys a query sees at most, itself included; 0: all before it; per layer
  double softmax_scale = 0;                // 0: 1 / sqrt(kv_channels)
  double attention_dropout = 0;
  double hidden_dropout = 0;
  double init_method_std = 0.02;
};

enum class CpCommType { p2p, all_gather, a2a, a2a_p2p, automatic };
enum class CpLayout { zigzag, contiguous, balanced };

struct ParallelConfig {
  int64_t tensor_model_parallel_size = 1;
  bool sequence_parallel = false;
  int64_t context_parallel_size = 1;
  std::vector<CpCommType> cp_comm_type = {CpCommType::automatic};  // per layer
  std::vector<int64_t> hierarchical_context_parallel_sizes;
  CpLayout cp_layout = CpLayout::zigzag;
  int64_t pipeline_model_parallel_size = 1;
  int64_t num_layers_per_virtual_pipeline_stage = 0;
  int64_t decoder_first_pipeline_num_layers = 0;  // layers of the first stage; 0: an even share
  int64_t decoder_last_pipeline_num_layers = 0;   // layers of the last stage; 0: an even share
  int64_t zero_stage = 0;
  bool overlap_grad_reduce = false;
  bool overlap_param_gather = false;
  std::string rank_order = "tp-cp-dp-pp";
};

enum class DataFormat { text, jsonl, fasta, megatron, tokens };

struct DataConfig {
  std::vector<std::string> path;
  DataFormat format = DataFormat::text;
  std::string tokenizer = "byte";  // byte or dna
  int64_t seq_length = 1024;
  bool pack_documents = true;
  bool document_mask = true;
  bool reset_position_ids = true;
  std::string split = "95,5";  // weights of the training and the held-out part
};

enum class Precision { fp32, bf16, fp8 };
enum class DeviceChoice { automatic, cpu, cuda };

struct TrainingConfig {
  int64_t train_iters = 100;
  int64_t micro_batch_size = 1;
  int64_t global_batch_size = 0;  // 0: micro_batch_size * data-parallel size
  int64_t seed = 1234;
  Precision precision = Precision::fp32;
  DeviceChoice device = DeviceChoice::automatic;
  bool deterministic = false;
  int64_t eval_interval = 0;  // steps between evaluations; 0: only at the end, and not at all without held-out rows
  int64_t eval_iters = 10;    // batches of one evaluation; 0: none
  int64_t log_interval = 1;
};

enum class OptimizerKind { adamw, sgd };
enum class LrDecay { constant, linear, cosine };

struct OptimizerConfig {
  double lr = 1e-3;
  double min_lr = 0;
  LrDecay lr_decay_style = LrDecay::cosine;
  int64_t lr_warmup_iters = 0;
  int64_t lr_decay_iters = 0;  // 0: train_iters
  double weight_decay = 0.1;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.95;
  double adam_eps = 1e-8;
  double clip_grad = 1.0;  // 0: no clipping
  OptimizerKind optimizer = OptimizerKind::adamw;
};

enum class Recompute { none, selective, full, automatic };

struct MemoryConfig {
  Recompute recompute_granularity = Recompute::selective;
  // With selective: what is recomputed in backward. Any of layernorm, qkv, attn_proj, mlp; empty means all four.
  std::vector<std::string> recompute_modules;
  int64_t mlp_tile_tokens = 0;   // 0: chosen from the sizes
  int64_t loss_tile_tokens = 0;  // 0: chosen from the sizes
  bool cpu_offload_activations = false;
  bool optimizer_cpu_offload = false;
  int64_t memory_limit = 0;  // bytes for all ranks of this machine together; 0: what the machine has available
};

enum class Backend { automatic, threads, mpi, nccl };

struct CommunicationConfig {
  Backend backend = Backend::automatic;
  double distributed_timeout_seconds = 600;
  bool cp_allgather_overlap = true;
  int64_t cp_allgather_buffer_size = 0;
  bool reduce_scatter_use_ring = false;
};

struct OutputConfig {
  std::string save;                // checkpoints go here; empty: DIR/checkpoints of the run's output folder
  int64_t save_interval = 0;       // steps between checkpoints; 0: only at the end
  std::string load;                // start from this checkpoint
  bool load_weights_only = false;  // with load: weights alone, from step 0 with a fresh optimizer
  bool tensorboard = false;
  bool trace = false;
  int64_t keep = 0;  // how many checkpoints to keep; 0: all
};

struct Config {
  ModelConfig model;
  ParallelConfig parallel;
  DataConfig data;
  TrainingConfig training;
  OptimizerConfig optimizer;
  MemoryConfig memory;
  CommunicationConfig communication;
  OutputConfig output;

  std::string name;  // the config file's stem; names runs/NAME
  std::map<std::string, std::string>
      origins;  // "model.num_layers" -> "default", "legal.yaml:4", "--num-layers", "preset"
};

// A setting that may differ by layer: one value for all layers, or one for each. Never empty.
template <typename Value>
Value value_of_layer(const std::vector<Value>& values, int64_t layer) {
  return values.size() == 1 ? values[0] : values.at(static_cast<size_t>(layer));
}

// `layer` counts from 0 over the whole model, whatever stage it is on.
inline int64_t window_of_layer(const ModelConfig& model, int64_t layer) {
  return value_of_layer(model.window_size, layer);
}
inline CpCommType cp_comm_type_of_layer(const ParallelConfig& parallel, int64_t layer) {
  return value_of_layer(parallel.cp_comm_type, layer);
}

// Sizes after every 0 = "derived" has been filled in (config/validate.h: resolve).
struct ResolvedSizes {
  int64_t world_size = 1;
  int64_t data_parallel_size = 1;
  int64_t micro_batches = 1;    // per rank and step
  int64_t pipeline_chunks = 1;  // virtual stages on each rank
  // Legal but poor choices, one line each with what they cost and what would do better; config/poor_choices.h.
  std::vector<std::string> warnings;
};

}  // namespace farspan
