// SPDX-License-Identifier: Apache-2.0
#include "config/poor_choices.h"

#include <algorithm>
#include <fmt/format.h>
#include <numeric>

#include "base/math.h"
#include "config/checks.h"
#include "config/head_split.h"
#include "config/names.h"

namespace farspan {
namespace {

constexpr double kLargestIdleShare = 0.25;     // of a pipeline's time
constexpr double kLargestPaddingShare = 0.01;  // of a row's tokens
constexpr int64_t kShortChunk = 128;           // tokens; about one tile of the attention kernels
constexpr int64_t kHalfRateTokens = 300;       // see poor_choices.h

using Warnings = std::vector<std::string>;

template <typename... Args>
void warn(Warnings& warnings, fmt::format_string<Args...> format, Args&&... args) {
  warnings.push_back(fmt::format(format, std::forward<Args>(args)...));
}

// --- Context parallelism. ---

// The tokens of a row are dealt in equal pieces of whole units.
int64_t row_unit(const ParallelConfig& parallel) {
  const int64_t chunks = parallel.cp_layout == CpLayout::zigzag && parallel.context_parallel_size > 1 ? 2 : 1;
  const int64_t tp = parallel.sequence_parallel ? parallel.tensor_model_parallel_size : 1;
  return parallel.context_parallel_size * std::lcm(chunks, tp);
}

void warn_of_row(const Config& config, Warnings& warnings) {
  const ParallelConfig& parallel = config.parallel;
  const int64_t S = config.data.seq_length;
  const int64_t cp = parallel.context_parallel_size;
  const int64_t unit = row_unit(parallel);
  const int64_t padded = round_up(S, unit);
  const double padding = static_cast<double>(padded - S) / static_cast<double>(padded);
  if (padding >= kLargestPaddingShare) {
    warn(warnings, "seq_length {} is padded to {} tokens, {:.1f} % of them padding; seq_length {} needs none", S,
         padded, 100 * padding, either(multiples_near(S, unit)));
  }
  if (cp == 1) return;
  const int64_t chunks = cp * (parallel.cp_layout == CpLayout::zigzag ? 2 : 1);
  const int64_t chunk = ceil_div(S, chunks);
  const bool whole_rows = std::all_of(parallel.cp_comm_type.begin(), parallel.cp_comm_type.end(),
                                      [](CpCommType type) { return type == CpCommType::a2a; });
  if (chunk >= kShortChunk || whole_rows) return;
  warn(warnings,
       "context_parallel_size {} cuts seq_length {} into chunks of {} tokens, on which attention takes about {:.0f} "
       "times its time; seq_length {} or more, or context_parallel_size {} or less, has chunks of {}",
       cp, S, chunk, static_cast<double>(chunk + kHalfRateTokens) / static_cast<double>(chunk), chunks * kShortChunk,
       std::max<int64_t>(1, S * cp / (chunks * kShortChunk)), kShortChunk);
}

// Ranks of the largest all-to-all that some layer makes; 1: none.
int64_t all_to_all_degree(const ParallelConfig& parallel) {
  if (uses_comm_type(parallel, CpCommType::a2a)) return parallel.context_parallel_size;
  const bool levels = uses_comm_type(parallel, CpCommType::a2a_p2p) && parallel.context_parallel_size > 1;
  return levels ? parallel.hierarchical_context_parallel_sizes.at(0) : 1;
}

void warn_of_comm_types(const Config& config, Warnings& warnings) {
  const ParallelConfig& parallel = config.parallel;
  const int64_t degree = all_to_all_degree(parallel);
  const int64_t kv_heads = local_kv_heads(config.model.num_query_groups, parallel.tensor_model_parallel_size);
  if (degree > kv_heads) {
    warn(warnings,
         "the all-to-all over {} ranks puts each of {} key/value heads on {} ranks: {} times the bytes of K and V; "
         "{} or p2p moves each once",
         degree, kv_heads, degree / kv_heads, degree / kv_heads,
         kv_heads > 1 ? fmt::format("a2a+p2p with hierarchical_context_parallel_sizes [{}, {}]", kv_heads,
                                    parallel.context_parallel_size / kv_heads)
                      : std::string("all_gather"));
  }
  const std::vector<int64_t>& sizes = parallel.hierarchical_context_parallel_sizes;
  if (sizes.size() == 2 && std::min(sizes[0], sizes[1]) == 1) {
    warn(warnings, "hierarchical_context_parallel_sizes [{}, {}] make a2a+p2p the same as {}; levels above 1 make two",
         sizes[0], sizes[1], sizes[1] == 1 ? "a2a" : "p2p");
  }
  if (parallel.cp_layout == CpLayout::balanced && parallel.context_parallel_size > 1 &&
      !(config.data.document_mask && config.data.pack_documents)) {
    warn(warnings,
         "cp_layout balanced deals out packed documents, and here a row is one (pack_documents {}, document_mask {}); "
         "zigzag is balanced then",
         config.data.pack_documents, config.data.document_mask);
  }
}

// --- Pipeline and data parallelism. ---

void warn_of_pipeline(const Config& config, const ResolvedSizes& sizes, Warnings& warnings) {
  const int64_t pp = config.parallel.pipeline_model_parallel_size;
  const int64_t of_virtual = config.parallel.num_layers_per_virtual_pipeline_stage;
  if (of_virtual > 0 && sizes.pipeline_chunks == 1) {
    warn(warnings, "num_layers_per_virtual_pipeline_stage {} has no effect: no stage has more layers", of_virtual);
  }
  const double work = static_cast<double>(sizes.pipeline_chunks * sizes.micro_batches);
  const double idle = static_cast<double>(pp - 1) / (work + static_cast<double>(pp - 1));
  if (idle <= kLargestIdleShare) return;
  const int64_t enough = ceil_div(3 * (pp - 1), sizes.pipeline_chunks);  // idle share 1/4
  warn(warnings,
       "pipeline_model_parallel_size {} with {} micro-batch{} a step is idle for {:.0f} % of it; global_batch_size {} "
       "({} "
       "micro-batches) brings it to 25 %, more virtual stages bring it down too",
       pp, sizes.micro_batches, sizes.micro_batches == 1 ? "" : "es", 100 * idle,
       enough * config.training.micro_batch_size * sizes.data_parallel_size, enough);
}

// Bytes of one rank's weights, as they are gathered.
double weight_bytes(const Config& config) {
  const ModelConfig& model = config.model;
  const double hidden = static_cast<double>(model.hidden_size);
  const double heads =
      static_cast<double>(2 * (model.num_attention_heads + model.num_query_groups) * model.kv_channels);
  const double layer = hidden * (heads + 3 * static_cast<double>(model.ffn_hidden_size));
  const double embedding = static_cast<double>(model.vocab_size) * hidden;
  const double parameters =
      static_cast<double>(model.num_layers) * layer + (model.untie_embeddings_and_output_weights ? 2 : 1) * embedding;
  const int64_t ranks = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size;
  return parameters / static_cast<double>(ranks) * (config.training.precision == Precision::fp32 ? 4 : 2);
}

void warn_of_data_parallelism(const Config& config, const ResolvedSizes& sizes, Warnings& warnings) {
  const ParallelConfig& parallel = config.parallel;
  const int64_t sharers = sizes.data_parallel_size * parallel.context_parallel_size;
  if (sharers == 1) {
    constexpr const char* kNone = "no other data- or context-parallel rank holds these weights";
    if (parallel.zero_stage > 0) warn(warnings, "zero_stage {} has no effect: {}", parallel.zero_stage, kNone);
    if (parallel.overlap_grad_reduce) warn(warnings, "overlap_grad_reduce has no effect: {}", kNone);
    if (parallel.overlap_param_gather) warn(warnings, "overlap_param_gather has no effect: {}", kNone);
    return;
  }
  if (parallel.overlap_param_gather && parallel.zero_stage == 0) {
    warn(warnings, "overlap_param_gather has no effect with zero_stage 0, which gathers no weights");
  }
  if (parallel.zero_stage == 3 && sizes.micro_batches > 1) {
    const double once = weight_bytes(config) * static_cast<double>(sharers - 1) / static_cast<double>(sharers);
    constexpr double kMiB = 1 << 20;
    warn(warnings,
         "zero_stage 3 gathers the weights for forward and backward of each of {} micro-batches: a rank receives about "
         "{:.1f} MiB a step, {:.1f} MiB with zero_stage 2; a larger micro_batch_size needs fewer",
         sizes.micro_batches, 2 * static_cast<double>(sizes.micro_batches) * once / kMiB, once / kMiB);
  }
}

// --- What has no effect. ---

void warn_of_unused(const Config& config, Warnings& warnings) {
  const OptimizerConfig& optimizer = config.optimizer;
  const OptimizerConfig defaults;
  const auto unused = [&](const char* name, double value, double fallback) {
    if (optimizer.optimizer == OptimizerKind::sgd && value != fallback)
      warn(warnings, "{} {} has no effect with optimizer sgd", name, value);
  };
  unused("adam_beta1", optimizer.adam_beta1, defaults.adam_beta1);
  unused("adam_beta2", optimizer.adam_beta2, defaults.adam_beta2);
  unused("adam_eps", optimizer.adam_eps, defaults.adam_eps);

  const ParallelConfig& parallel = config.parallel;
  if (parallel.context_parallel_size == 1) {
    if (!uses_comm_type(parallel, CpCommType::automatic))
      warn(warnings, "cp_comm_type {} has no effect with context_parallel_size 1",
           choice_name(parallel.cp_comm_type[0]));
    return;
  }
  const bool gathers =
      uses_comm_type(parallel, CpCommType::all_gather) || uses_comm_type(parallel, CpCommType::automatic);
  if (!gathers && config.communication.cp_allgather_buffer_size > 0) {
    warn(warnings, "cp_allgather.buffer_size {} has no effect: no layer has cp_comm_type all_gather",
         config.communication.cp_allgather_buffer_size);
  }
}

}  // namespace

Warnings poor_choices(const Config& config, const ResolvedSizes& sizes) {
  Warnings warnings;
  warn_of_row(config, warnings);
  warn_of_comm_types(config, warnings);
  warn_of_pipeline(config, sizes, warnings);
  warn_of_data_parallelism(config, sizes, warnings);
  warn_of_unused(config, warnings);
  return warnings;
}

Warnings poor_placement(const ParallelConfig& parallel, const ResolvedSizes& sizes, const HostMap& hosts) {
  const int64_t tp = parallel.tensor_model_parallel_size;
  // Ranks that differ along tp, and along the axes that vary faster, lie in blocks of `block` consecutive ranks.
  int64_t block = tp;
  for (size_t begin = 0; parallel.rank_order.substr(begin, 2) != "tp"; begin += 3) {
    const std::string axis = parallel.rank_order.substr(begin, 2);
    block *= axis == "cp"   ? parallel.context_parallel_size
             : axis == "pp" ? parallel.pipeline_model_parallel_size
                            : sizes.data_parallel_size;
  }
  int64_t cut = 0;  // machine borders inside a block: some tensor group there has ranks on both sides
  for (int64_t host = 0; host + 1 < hosts.hosts(); ++host) cut += hosts.end_rank(host) % block != 0 ? 1 : 0;
  if (tp == 1 || cut == 0) return {};
  Warnings warnings;
  warn(warnings,
       "tensor groups of {} ranks cross {} of {} machine borders, and every layer waits for 4 sums over them a "
       "micro-batch; a tensor_model_parallel_size that divides the ranks of a machine, with tp first in rank_order, "
       "keeps them inside",
       tp, cut, hosts.hosts() - 1);
  return warnings;
}

}  // namespace farspan
