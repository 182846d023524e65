// SPDX-License-Identifier: Apache-2.0
#include "config/keys.h"

#include <algorithm>
#include <iterator>
#include <type_traits>
#include <utility>

#include "config/field_text.h"

namespace farspan {
namespace {

// Follows pointers to members from the configuration to a field: at(config, &Config::model, &ModelConfig::num_layers).
template <typename Object, typename First, typename... Rest>
auto& at(Object& object, First first, Rest... rest) {
  if constexpr (sizeof...(Rest) == 0) {
    return object.*first;
  } else {
    return at(object.*first, rest...);
  }
}

template <typename... Members>
Key key(std::string section, std::string name, std::string help, Members... members) {
  using Field = std::remove_cvref_t<decltype(at(std::declval<Config&>(), members...))>;
  Key made;
  made.section = std::move(section);
  made.name = std::move(name);
  made.values = values_of<Field>();
  made.help = std::move(help);
  made.is_boolean = std::is_same_v<Field, bool>;
  made.is_list = std::is_same_v<Field, std::vector<std::string>> || std::is_same_v<Field, std::vector<int64_t>>;
  made.read = [members...](Config& config, const ValueText& value) { read_field(value, at(config, members...)); };
  made.write = [members...](const Config& config) { return write_field(at(config, members...)); };
  return made;
}

// A count of bytes: a unit may follow the number.
template <typename... Members>
Key bytes_key(std::string section, std::string name, std::string help, Members... members) {
  Key made = key(std::move(section), std::move(name), std::move(help), members...);
  made.values = "BYTES";
  made.read = [members...](Config& config, const ValueText& value) {
    std::string text;
    read_field(value, text);
    at(config, members...) = read_bytes(text);
  };
  return made;
}

// One value for all layers, or one for each.
template <typename... Members>
Key per_layer_key(std::string section, std::string name, std::string help, Members... members) {
  using Item = typename std::remove_cvref_t<decltype(at(std::declval<Config&>(), members...))>::value_type;
  Key made = key(std::move(section), std::move(name), std::move(help), members...);
  made.values = values_of<Item>() + ",...";
  made.is_list = true;
  made.is_per_layer = true;
  made.read = [members...](Config& config, const ValueText& value) { read_per_layer(value, at(config, members...)); };
  made.write = [members...](const Config& config) { return write_per_layer(at(config, members...)); };
  return made;
}

void append(std::vector<Key>& table, std::vector<Key> keys) {
  std::move(keys.begin(), keys.end(), std::back_inserter(table));
}

std::vector<Key> model_keys() {
  constexpr auto kModel = &Config::model;
  constexpr auto kScaling = &ModelConfig::rope_scaling;
  return {
      key("model", "preset", "sizes of a published model; keys given beside it override it", kModel,
          &ModelConfig::preset),
      key("model", "num_layers", "layers", kModel, &ModelConfig::num_layers),
      key("model", "hidden_size", "width of the residual stream", kModel, &ModelConfig::hidden_size),
      key("model", "ffn_hidden_size", "width inside the MLP; 0: 8/3 hidden_size, rounded up to a multiple of 64",
          kModel, &ModelConfig::ffn_hidden_size),
      key("model", "num_attention_heads", "query heads", kModel, &ModelConfig::num_attention_heads),
      key("model", "num_query_groups", "key/value heads; 0: num_attention_heads", kModel,
          &ModelConfig::num_query_groups),
      key("model", "kv_channels", "head size; 0: hidden_size / num_attention_heads", kModel, &ModelConfig::kv_channels),
      key("model", "vocab_size", "rows of the embedding; 0: the tokenizer's", kModel, &ModelConfig::vocab_size),
      key("model", "rotary_base", "base of the rotary frequencies", kModel, &ModelConfig::rotary_base),
      key("model", "rotary_interleaved", "rotate neighbouring channels instead of the two halves", kModel,
          &ModelConfig::rotary_interleaved),
      key("model", "rope_scaling.type", "how rotary frequencies are stretched for longer rows", kModel, kScaling,
          &RopeScalingConfig::type),
      key("model", "rope_scaling.factor", "by how much", kModel, kScaling, &RopeScalingConfig::factor),
      key("model", "rope_scaling.low_freq_factor", "llama3: waves longer than original / this are stretched in full",
          kModel, kScaling, &RopeScalingConfig::low_freq_factor),
      key("model", "rope_scaling.high_freq_factor", "llama3: waves shorter than original / this are kept", kModel,
          kScaling, &RopeScalingConfig::high_freq_factor),
      key("model", "rope_scaling.original_max_position_embeddings",
          "llama3, yarn: tokens the model was first trained on", kModel, kScaling,
          &RopeScalingConfig::original_max_position_embeddings),
      key("model", "rope_scaling.beta_fast", "yarn: channels that turn more often than this are kept", kModel, kScaling,
          &RopeScalingConfig::beta_fast),
      key("model", "rope_scaling.beta_slow", "yarn: channels that turn less often than this are stretched in full",
          kModel, kScaling, &RopeScalingConfig::beta_slow),
      key("model", "norm_epsilon", "epsilon of the RMS norms", kModel, &ModelConfig::norm_epsilon),
      key("model", "untie_embeddings_and_output_weights", "give the output layer its own weights", kModel,
          &ModelConfig::untie_embeddings_and_output_weights),
      key("model", "qk_layernorm", "RMS norm of each query and key head", kModel, &ModelConfig::qk_layernorm),
      key("model", "add_qkv_bias", "biases on the query, key and value projections", kModel,
          &ModelConfig::add_qkv_bias),
      per_layer_key("model", "window_size",
                    "keys a query sees at most, itself included; 0: all before it; one, or one for each layer", kModel,
                    &ModelConfig::window_size),
      key("model", "softmax_scale", "factor of the attention scores; 0: 1 / sqrt(kv_channels)", kModel,
          &ModelConfig::softmax_scale),
      key("model", "attention_dropout", "probability", kModel, &ModelConfig::attention_dropout),
      key("model", "hidden_dropout", "probability", kModel, &ModelConfig::hidden_dropout),
      key("model", "init_method_std", "standard deviation of the initial weights", kModel,
          &ModelConfig::init_method_std),
  };
}

std::vector<Key> parallel_keys() {
  constexpr auto kParallel = &Config::parallel;
  return {
      key("parallel", "tensor_model_parallel_size", "ranks that share each layer's weights", kParallel,
          &ParallelConfig::tensor_model_parallel_size),
      key("parallel", "sequence_parallel", "cut norms and residuals over the tensor-parallel ranks", kParallel,
          &ParallelConfig::sequence_parallel),
      key("parallel", "context_parallel_size", "ranks that share each row's tokens", kParallel,
          &ParallelConfig::context_parallel_size),
      per_layer_key("parallel", "cp_comm_type",
                    "how keys and values travel between those ranks; one, or one for each layer", kParallel,
                    &ParallelConfig::cp_comm_type),
      key("parallel", "hierarchical_context_parallel_sizes", "a2a+p2p: ranks of each level; empty: derived", kParallel,
          &ParallelConfig::hierarchical_context_parallel_sizes),
      key("parallel", "cp_layout", "which tokens of a row a rank owns", kParallel, &ParallelConfig::cp_layout),
      key("parallel", "pipeline_model_parallel_size", "stages the layers are cut into", kParallel,
          &ParallelConfig::pipeline_model_parallel_size),
      key("parallel", "num_layers_per_virtual_pipeline_stage", "layers of one virtual stage; 0: stages are not cut",
          kParallel, &ParallelConfig::num_layers_per_virtual_pipeline_stage),
      key("parallel", "decoder_first_pipeline_num_layers", "layers of the first stage; 0: an even share", kParallel,
          &ParallelConfig::decoder_first_pipeline_num_layers),
      key("parallel", "decoder_last_pipeline_num_layers", "layers of the last stage; 0: an even share", kParallel,
          &ParallelConfig::decoder_last_pipeline_num_layers),
      key("parallel", "zero_stage", "what data-parallel ranks share: 0 nothing, 1 optimizer, 2 gradients, 3 weights",
          kParallel, &ParallelConfig::zero_stage),
      key("parallel", "overlap_grad_reduce", "reduce gradients during backward", kParallel,
          &ParallelConfig::overlap_grad_reduce),
      key("parallel", "overlap_param_gather", "gather weights during forward", kParallel,
          &ParallelConfig::overlap_param_gather),
      key("parallel", "rank_order", "axes of the rank grid, fastest first", kParallel, &ParallelConfig::rank_order),
  };
}

std::vector<Key> data_keys() {
  constexpr auto kData = &Config::data;
  return {
      key("data", "path", "files or folders", kData, &DataConfig::path),
      key("data", "format", "what the files hold", kData, &DataConfig::format),
      key("data", "tokenizer", "byte or dna", kData, &DataConfig::tokenizer),
      key("data", "seq_length", "tokens of a row", kData, &DataConfig::seq_length),
      key("data", "pack_documents", "fill rows with several documents", kData, &DataConfig::pack_documents),
      key("data", "document_mask", "tokens see their own document only", kData, &DataConfig::document_mask),
      key("data", "reset_position_ids", "positions start at 0 in each document", kData,
          &DataConfig::reset_position_ids),
      key("data", "split", "weights of the training and the held-out part", kData, &DataConfig::split),
  };
}

std::vector<Key> training_keys() {
  constexpr auto kTraining = &Config::training;
  return {
      key("training", "train_iters", "steps", kTraining, &TrainingConfig::train_iters),
      key("training", "micro_batch_size", "rows a rank works on at once", kTraining, &TrainingConfig::micro_batch_size),
      key("training", "global_batch_size", "rows of a step over all ranks; 0: micro_batch_size * data-parallel size",
          kTraining, &TrainingConfig::global_batch_size),
      key("training", "seed", "seed of the initial weights, of the order of rows and of dropout", kTraining,
          &TrainingConfig::seed),
      key("training", "precision",
          "type of activations and matrix products (fp8: of the layers' products; all else as bf16)", kTraining,
          &TrainingConfig::precision),
      key("training", "device", "where ranks compute", kTraining, &TrainingConfig::device),
      key("training", "deterministic", "the same bits on every run", kTraining, &TrainingConfig::deterministic),
      key("training", "eval_interval", "steps between evaluations; 0: only at the end", kTraining,
          &TrainingConfig::eval_interval),
      key("training", "eval_iters", "batches of one evaluation; 0: none", kTraining, &TrainingConfig::eval_iters),
      key("training", "log_interval", "steps between log lines", kTraining, &TrainingConfig::log_interval),
  };
}

std::vector<Key> optimizer_keys() {
  constexpr auto kOptimizer = &Config::optimizer;
  return {
      key("optimizer", "lr", "highest learning rate", kOptimizer, &OptimizerConfig::lr),
      key("optimizer", "min_lr", "learning rate after the decay", kOptimizer, &OptimizerConfig::min_lr),
      key("optimizer", "lr_decay_style", "shape of the decay", kOptimizer, &OptimizerConfig::lr_decay_style),
      key("optimizer", "lr_warmup_iters", "steps of linear warm-up", kOptimizer, &OptimizerConfig::lr_warmup_iters),
      key("optimizer", "lr_decay_iters", "step at which the decay ends; 0: train_iters", kOptimizer,
          &OptimizerConfig::lr_decay_iters),
      key("optimizer", "weight_decay", "decoupled weight decay", kOptimizer, &OptimizerConfig::weight_decay),
      key("optimizer", "adam_beta1", "decay of the first moment", kOptimizer, &OptimizerConfig::adam_beta1),
      key("optimizer", "adam_beta2", "decay of the second moment", kOptimizer, &OptimizerConfig::adam_beta2),
      key("optimizer", "adam_eps", "added to the root of the second moment", kOptimizer, &OptimizerConfig::adam_eps),
      key("optimizer", "clip_grad", "largest norm of the whole gradient; 0: no clipping", kOptimizer,
          &OptimizerConfig::clip_grad),
      key("optimizer", "optimizer", "update rule", kOptimizer, &OptimizerConfig::optimizer),
  };
}

std::vector<Key> memory_keys() {
  constexpr auto kMemory = &Config::memory;
  return {
      key("memory", "recompute_granularity", "what backward computes again instead of keeping it", kMemory,
          &MemoryConfig::recompute_granularity),
      key("memory", "recompute_modules", "selective: any of layernorm, qkv, attn_proj, mlp; empty: all four", kMemory,
          &MemoryConfig::recompute_modules),
      key("memory", "mlp_tile_tokens", "tokens the MLP works on at once; 0: chosen from the sizes", kMemory,
          &MemoryConfig::mlp_tile_tokens),
      key("memory", "loss_tile_tokens", "tokens whose logits exist at once; 0: chosen from the sizes", kMemory,
          &MemoryConfig::loss_tile_tokens),
      key("memory", "cpu_offload_activations", "move what is kept for backward to host memory (not in this version)",
          kMemory, &MemoryConfig::cpu_offload_activations),
      key("memory", "optimizer_cpu_offload", "keep the optimizer's state in host memory (not in this version)", kMemory,
          &MemoryConfig::optimizer_cpu_offload),
      bytes_key("memory", "memory_limit",
                "for all ranks of this machine together (16GiB, 16GB); 0: what the machine has available", kMemory,
                &MemoryConfig::memory_limit),
  };
}

std::vector<Key> communication_keys() {
  constexpr auto kCommunication = &Config::communication;
  return {
      key("communication", "backend", "what carries messages between ranks", kCommunication,
          &CommunicationConfig::backend),
      key("communication", "distributed_timeout_seconds", "how long a rank waits for the others", kCommunication,
          &CommunicationConfig::distributed_timeout_seconds),
      key("communication", "cp_allgather.overlap", "all_gather: gather ahead of the attention that needs it",
          kCommunication, &CommunicationConfig::cp_allgather_overlap),
      bytes_key("communication", "cp_allgather.buffer_size",
                "all_gather: bytes of its buffers (one head at least); 0: what attention holds", kCommunication,
                &CommunicationConfig::cp_allgather_buffer_size),
      key("communication", "reduce_scatter.use_ring", "reduce-scatter by a ring (not in this version)", kCommunication,
          &CommunicationConfig::reduce_scatter_use_ring),
  };
}

std::vector<Key> output_keys() {
  constexpr auto kOutput = &Config::output;
  return {
      key("output", "save", "folder of the checkpoints; empty: checkpoints/ in the run's folder", kOutput,
          &OutputConfig::save),
      key("output", "save_interval", "steps between checkpoints; 0: only at the end", kOutput,
          &OutputConfig::save_interval),
      key("output", "load", "checkpoint to start from", kOutput, &OutputConfig::load),
      key("output", "load_weights_only", "with load: weights alone, from step 0 with a fresh optimizer", kOutput,
          &OutputConfig::load_weights_only),
      key("output", "tensorboard", "write TensorBoard event files (not in this version)", kOutput,
          &OutputConfig::tensorboard),
      key("output", "trace", "write a Chrome trace of one step, every rank's", kOutput, &OutputConfig::trace),
      key("output", "keep", "checkpoints to keep; 0: all", kOutput, &OutputConfig::keep),
  };
}

std::vector<Key> make_table() {
  std::vector<Key> table;
  append(table, model_keys());
  append(table, parallel_keys());
  append(table, data_keys());
  append(table, training_keys());
  append(table, optimizer_keys());
  append(table, memory_keys());
  append(table, communication_keys());
  append(table, output_keys());
  return table;
}

}  // namespace

std::string Key::flag() const {
  std::string text = "--" + name;
  for (char& c : text) {
    if (c == '_' || c == '.') c = '-';
  }
  return text;
}

std::span<const Key> config_keys() {
  static const std::vector<Key> table = make_table();
  return table;
}

const Key* find_key(std::string_view path) {
  for (const Key& key : config_keys()) {
    if (path == key.path()) return &key;
  }
  return nullptr;
}

std::span<const std::string> config_sections() {
  static const std::vector<std::string> sections = [] {
    std::vector<std::string> names;
    for (const Key& key : config_keys()) {
      if (names.empty() || names.back() != key.section) names.push_back(key.section);
    }
    return names;
  }();
  return sections;
}

bool is_key_group(std::string_view path) {
  const std::string prefix = std::string(path) + ".";
  return std::any_of(config_keys().begin(), config_keys().end(),
                     [&](const Key& key) { return key.path().starts_with(prefix); });
}

}  // namespace farspan
