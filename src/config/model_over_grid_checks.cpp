// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <vector>

#include "base/math.h"
#include "config/checks.h"
#include "config/head_split.h"

namespace farspan {
namespace {

constexpr int64_t kLargestDerivedLevel = 8;  // ranks of one all-to-all of a2a+p2p: those of one machine, as a rule

// Whether the sizes that this file divides are there at all; what is wrong with them has its reason already.
bool heads_fit(const ModelConfig& model) {
  return model.num_attention_heads >= 1 && model.num_query_groups >= 0 &&
         model.num_attention_heads % kv_heads_of(model) == 0;
}

std::string heads_text(const ModelConfig& model) {
  return fmt::format("num_attention_heads {} with {} key/value heads", model.num_attention_heads, kv_heads_of(model));
}

void check_tensor(const ModelConfig& model, int64_t tp, Reasons& reasons) {
  const int64_t heads = model.num_attention_heads;
  const int64_t kv_heads = kv_heads_of(model);
  if (heads_fit(model) && !splits_heads(heads, kv_heads, tp)) {
    std::string works =
        fmt::format("use tensor_model_parallel_size {}", either(nearest(a2a_degrees(heads, kv_heads), tp)));
    if (heads % tp != 0) {
      works += fmt::format(", or num_attention_heads {}", either(multiples_near(heads, tp)));
    } else {
      std::vector<int64_t> groups = divisors_of(heads);
      std::erase_if(groups, [&](int64_t group) { return !splits_heads(heads, group, tp); });
      works += fmt::format(", or num_query_groups {}", either(nearest(std::move(groups), kv_heads)));
    }
    reasons.add("{} cannot be cut over tensor_model_parallel_size {}; {}", heads_text(model), tp, works);
  }
  const int64_t width = ffn_hidden_size_of(model);
  if (model.ffn_hidden_size >= 0 && model.hidden_size >= 1 && width % tp != 0) {
    reasons.add("ffn_hidden_size {}{} is not a multiple of tensor_model_parallel_size {}; use ffn_hidden_size {}",
                width, model.ffn_hidden_size == 0 ? " (derived)" : "", tp, either(multiples_near(width, tp)));
  }
}

// Matrix units read 8-bit operands in pieces of 16 along whatever is summed over (ops/fp8.h): every width of a rank's
// linear weights.
constexpr int64_t kFp8Widths = 16;

void check_fp8(const Config& config, Reasons& reasons) {
  const ModelConfig& model = config.model;
  const int64_t tp = config.parallel.tensor_model_parallel_size;
  if (config.training.precision != Precision::fp8 || model.hidden_size < 1 || !heads_fit(model)) return;
  if (!splits_heads(model.num_attention_heads, kv_heads_of(model), tp)) return;
  const int64_t channels = model.kv_channels > 0 ? model.kv_channels : model.hidden_size / model.num_attention_heads;
  const int64_t heads = model.num_attention_heads / tp, kv_heads = local_kv_heads(kv_heads_of(model), tp);
  const std::pair<std::string_view, int64_t> widths[] = {
      {"hidden_size", model.hidden_size},
      {"a rank's query heads times kv_channels,", heads * channels},
      {"a rank's query, key and value heads times kv_channels,", (heads + 2 * kv_heads) * channels},
      {"a rank's share of ffn_hidden_size,", ffn_hidden_size_of(model) / tp}};
  for (const auto& [name, width] : widths)
    if (width % kFp8Widths != 0)
      reasons.add("precision fp8 needs widths in multiples of {}, found {} {}; use precision bf16, or make it {}",
                  kFp8Widths, name, width, either(multiples_near(width, kFp8Widths)));
}

// The degrees by which one tensor-parallel rank's heads can be cut; empty where tp does not fit them.
std::vector<int64_t> degrees_of_rank(const Config& config) {
  const ModelConfig& model = config.model;
  const int64_t tp = config.parallel.tensor_model_parallel_size;
  if (!heads_fit(model) || !splits_heads(model.num_attention_heads, kv_heads_of(model), tp)) return {};
  return a2a_degrees(model.num_attention_heads / tp, local_kv_heads(kv_heads_of(model), tp));
}

bool among(const std::vector<int64_t>& degrees, int64_t degree) {
  return std::binary_search(degrees.begin(), degrees.end(), degree);
}

// "tensor_model_parallel_size 2 * context_parallel_size 4 = 8", or without tensor parallelism the second alone.
std::string product_text(int64_t tp, std::string_view name, int64_t degree) {
  if (tp == 1) return fmt::format("{} {}", name, degree);
  return fmt::format("tensor_model_parallel_size {} * {} {} = {}", tp, name, degree, tp * degree);
}

void check_all_to_all(const Config& config, Reasons& reasons) {
  const ParallelConfig& parallel = config.parallel;
  const int64_t tp = parallel.tensor_model_parallel_size;
  const int64_t cp = parallel.context_parallel_size;
  const std::vector<int64_t> degrees = degrees_of_rank(config);
  if (cp < 2 || degrees.empty()) return;
  if (uses_comm_type(parallel, CpCommType::a2a) && !among(degrees, cp)) {
    reasons.add(
        "{} cannot be cut over {}, as cp_comm_type a2a does; use context_parallel_size {}, or cp_comm_type p2p, "
        "all_gather or a2a+p2p",
        heads_text(config.model), product_text(tp, "context_parallel_size", cp), either(nearest(degrees, cp)));
  }
  if (!uses_comm_type(parallel, CpCommType::a2a_p2p)) return;
  const std::vector<int64_t>& sizes = parallel.hierarchical_context_parallel_sizes;
  if (sizes.empty() && derived_hierarchical_sizes(config).empty()) {
    reasons.add(
        "{} cannot be cut over {} nor over a part of it, as cp_comm_type a2a+p2p does; use context_parallel_size {}, "
        "or cp_comm_type p2p or all_gather",
        heads_text(config.model), product_text(tp, "context_parallel_size", cp), either(nearest(degrees, cp)));
  }
  if (sizes.size() == 2 && sizes[0] >= 1 && !among(degrees, sizes[0])) {
    std::vector<int64_t> works = degrees;
    std::erase_if(works, [&](int64_t degree) { return cp % degree != 0; });
    reasons.add(
        "{} cannot be cut over {}; use a first of hierarchical_context_parallel_sizes of {}, or cp_comm_type p2p or "
        "all_gather",
        heads_text(config.model), product_text(tp, "the first of hierarchical_context_parallel_sizes,", sizes[0]),
        either(nearest(works, sizes[0])));
  }
}

// Layers of the largest and the smallest stage.
struct StageLayers {
  int64_t largest = 0;
  int64_t smallest = 0;
};

StageLayers stage_layers(const Config& config) {
  const ParallelConfig& parallel = config.parallel;
  const int64_t first = parallel.decoder_first_pipeline_num_layers;
  const int64_t last = parallel.decoder_last_pipeline_num_layers;
  const int64_t given = (first > 0 ? 1 : 0) + (last > 0 ? 1 : 0);
  const int64_t others = parallel.pipeline_model_parallel_size - given;
  const int64_t rest = std::max<int64_t>(0, config.model.num_layers - first - last);
  StageLayers layers = {std::max(first, last), config.model.num_layers};
  if (first > 0) layers.smallest = std::min(layers.smallest, first);
  if (last > 0) layers.smallest = std::min(layers.smallest, last);
  if (others > 0) {
    layers.largest = std::max(layers.largest, ceil_div(rest, others));
    layers.smallest = std::min(layers.smallest, rest / others);
  }
  return layers;
}

// Every stage has layers, and every virtual stage of it.
void check_pipeline(const Config& config, ResolvedSizes& sizes, Reasons& reasons) {
  const ParallelConfig& parallel = config.parallel;
  const int64_t layers = config.model.num_layers;
  const int64_t pp = parallel.pipeline_model_parallel_size;
  const int64_t first = parallel.decoder_first_pipeline_num_layers;
  const int64_t last = parallel.decoder_last_pipeline_num_layers;
  const int64_t of_virtual = parallel.num_layers_per_virtual_pipeline_stage;
  if (layers < 1 || pp < 2 || first < 0 || last < 0 || of_virtual < 0) return;
  if (pp == 2 && first > 0 && last > 0 && first + last != layers) {
    reasons.add(
        "decoder_first_pipeline_num_layers {} + decoder_last_pipeline_num_layers {} are not num_layers {}; use "
        "{} for the last, or give one of the two",
        first, last, layers, std::max<int64_t>(1, layers - first));
    return;
  }
  const StageLayers stage = stage_layers(config);
  if (of_virtual > 0) sizes.pipeline_chunks = ceil_div(stage.largest, of_virtual);
  if (stage.smallest >= sizes.pipeline_chunks) return;

  std::string stages = fmt::format("pipeline_model_parallel_size {}", pp);
  if (first > 0) stages += fmt::format(", decoder_first_pipeline_num_layers {}", first);
  if (last > 0) stages += fmt::format(", decoder_last_pipeline_num_layers {}", last);
  if (sizes.pipeline_chunks > 1) {
    reasons.add(
        "num_layers {} cannot fill {} virtual stages on each stage ({}; num_layers_per_virtual_pipeline_stage {}); "
        "use num_layers_per_virtual_pipeline_stage {}, or 0",
        layers, sizes.pipeline_chunks, stages, of_virtual,
        stage.smallest < 1 ? layers : ceil_div(stage.largest, stage.smallest));
  } else {
    reasons.add(
        "num_layers {} cannot fill every stage ({}); use num_layers {} or more, or pipeline_model_parallel_size "
        "{} or less",
        layers, stages, first + last + pp - (first > 0 ? 1 : 0) - (last > 0 ? 1 : 0),
        std::max<int64_t>(1, std::min(layers, pp - 1)));
  }
}

}  // namespace

std::vector<int64_t> derived_hierarchical_sizes(const Config& config) {
  const int64_t cp = config.parallel.context_parallel_size;
  int64_t inner = 0;
  for (int64_t degree : degrees_of_rank(config)) {
    const bool one_level = degree == cp && inner > 1;  // a smaller one leaves a second level
    if (degree > 1 && degree <= kLargestDerivedLevel && cp % degree == 0 && !one_level) inner = degree;
  }
  if (inner == 0) return {};
  return {inner, cp / inner};
}

void check_model_over_grid(const Config& config, ResolvedSizes& sizes, Reasons& reasons) {
  const int64_t tp = config.parallel.tensor_model_parallel_size;
  if (tp < 1) return;
  if (tp > 1) check_tensor(config.model, tp, reasons);
  check_fp8(config, reasons);
  check_all_to_all(config, reasons);
  check_pipeline(config, sizes, reasons);
}

}  // namespace farspan
