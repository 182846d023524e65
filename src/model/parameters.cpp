// SPDX-License-Identifier: Apache-2.0
#include "model/parameters.h"

#include <algorithm>
#include <cmath>

#include "base/math.h"
#include "base/philox.h"
#include "device/parallel_for.h"

namespace farspan {
namespace {

// Part `rank` of `whole` things dealt to `size` ranks; the first ones hold one more where it does not divide.
Span even_part(int64_t whole, int size, int rank) {
  const int64_t least = whole / size;
  const int64_t longer = whole % size;
  const int64_t begin = rank * least + std::min<int64_t>(rank, longer);
  return {begin, begin + least + (rank < longer ? 1 : 0)};
}

int64_t section_total(const std::vector<Section>& sections) {
  int64_t total = 0;
  for (const Section& section : sections) total += section.length;
  return total;
}

// Lays sections given by their place in the whole one after the other.
std::vector<Section> in_order(std::vector<Section> sections) {
  int64_t at = 0;
  for (Section& section : sections) {
    section.part_begin = at;
    at += section.length;
  }
  return sections;
}

Section section_of(Span whole) { return {.whole_begin = whole.begin, .length = whole.length()}; }

// Rows of the fused query/key/value weight: `per_head` of them a head.
std::vector<Section> query_key_value_sections(const ModelConfig& config, int size, int rank, int64_t per_head) {
  const Span query = query_heads_of(config, size, rank);
  const Span shared = key_value_heads_of(config, size, rank);
  const bool replicated = size > config.num_query_groups;
  const bool owned = !replicated || rank % (size / config.num_query_groups) == 0;
  const auto key_value = [&](int64_t first_head) {
    return Section{.whole_begin = (first_head + shared.begin) * per_head,
                   .length = shared.length() * per_head,
                   .owned = owned,
                   .shared_head = replicated};
  };
  return in_order({{.whole_begin = query.begin * per_head, .length = query.length() * per_head},
                   key_value(config.num_attention_heads),
                   key_value(config.num_attention_heads + config.num_query_groups)});
}

}  // namespace

Span query_heads_of(const ModelConfig& config, int tensor_size, int tensor_rank) {
  return even_part(config.num_attention_heads, tensor_size, tensor_rank);
}

Span key_value_heads_of(const ModelConfig& config, int tensor_size, int tensor_rank) {
  if (tensor_size <= config.num_query_groups) return even_part(config.num_query_groups, tensor_size, tensor_rank);
  const int64_t head = tensor_rank / (tensor_size / config.num_query_groups);
  return {head, head + 1};
}

Span vocabulary_of(const ModelConfig& config, int tensor_size, int tensor_rank) {
  return even_part(config.vocab_size, tensor_size, tensor_rank);
}

std::vector<ElementRun> element_runs(const Parameter& parameter, const Section& section) {
  if (parameter.cut != Cut::columns) {
    const int64_t row = parameter.shape.numel() / parameter.shape[0];
    return {{section.part_begin * row, section.whole_begin * row, section.length * row}};
  }
  std::vector<ElementRun> runs;
  for (int64_t row = 0; row < parameter.shape[0]; ++row)
    runs.push_back({row * parameter.shape[1] + section.part_begin, row * parameter.whole[1] + section.whole_begin,
                    section.length});
  return runs;
}

ParameterTable::ParameterTable(const ModelConfig& config, const ModelShare& share) : share_(share) {
  if (share_.chunks.empty()) share_.chunks = {{0, config.num_layers}};
  const int64_t H = config.hidden_size;
  const Start normal = {.std = config.init_method_std};
  const bool tied = !config.untie_embeddings_and_output_weights;
  const auto vocabulary = [&](int rank) {
    return in_order({section_of(vocabulary_of(config, share_.tensor_size, rank))});
  };
  const bool tied_copy = tied && share_.last_stage && !share_.first_stage;
  if (share_.first_stage || tied_copy) {
    begin_unit("embedding");
    Parameter& embedding = add_cut("embedding.weight", {config.vocab_size, H}, Cut::rows, normal, vocabulary);
    if (tied_copy) embedding.sections[0].owned = false;
    end_unit();
    if (tied && share_.first_stage && share_.last_stage) units_.back().gradient_uses = 2;
  }
  for (const Span& chunk : share_.chunks)
    for (int64_t layer = chunk.begin; layer < chunk.end; ++layer) add_layer(config, layer);
  if (!share_.last_stage) return;
  begin_unit("final_norm");
  add("final_norm.weight", {H}, {.initialisation = Initialisation::ones, .decay = false});
  end_unit();
  if (tied) return;
  begin_unit("head");
  add_cut("head.weight", {config.vocab_size, H}, Cut::rows, normal, vocabulary);
  end_unit();
}

void ParameterTable::add_layer(const ModelConfig& config, int64_t layer) {
  const int64_t H = config.hidden_size;
  const int64_t F = config.ffn_hidden_size;
  const int64_t D = config.kv_channels;
  const int64_t A = config.num_attention_heads;
  const int64_t K = config.num_query_groups;
  const int size = share_.tensor_size;
  const Start normal = {.std = config.init_method_std};
  // Projections that write to the residual stream start smaller, so that its variance does not grow with depth.
  // Radford et al., GPT-2 (2019), section 2.3; Megatron-LM's scaled_init_method_normal.
  const Start residual = {.std = config.init_method_std / std::sqrt(2.0 * static_cast<double>(config.num_layers))};
  const Start ones = {.initialisation = Initialisation::ones, .decay = false};
  const auto heads = [&](int rank) { return query_key_value_sections(config, size, rank, D); };
  const auto attended = [&](int rank) {
    const Span query = query_heads_of(config, size, rank);
    return in_order({section_of({query.begin * D, query.end * D})});
  };
  const auto gate_and_up = [&](int rank) {
    const Span hidden = even_part(F, size, rank);
    return in_order({section_of(hidden), section_of({F + hidden.begin, F + hidden.end})});
  };
  const auto hidden = [&](int rank) { return in_order({section_of(even_part(F, size, rank))}); };

  const std::string prefix = fmt::format("layers.{}.", layer);
  const bool shared_heads = size > K;
  const auto fused = [&](Parameter& parameter) {
    if (shared_heads) parameter.tensor_gradient = TensorGradient::shared_heads;
  };
  begin_unit(fmt::format("layers.{}", layer));
  add(prefix + "attention_norm.weight", {H}, ones);
  fused(add_cut(prefix + "qkv.weight", {(A + 2 * K) * D, H}, Cut::rows, normal, heads));
  if (config.add_qkv_bias) {
    const Start zeros = {.initialisation = Initialisation::zeros, .decay = false};
    fused(add_cut(prefix + "qkv.bias", {(A + 2 * K) * D}, Cut::rows, zeros, heads));
  }
  if (config.qk_layernorm) {
    for (const char* name : {"query_norm.weight", "key_norm.weight"})
      if (size > 1)
        add(prefix + name, {D}, ones).tensor_gradient = TensorGradient::partial;
      else
        add(prefix + name, {D}, ones);
  }
  add_cut(prefix + "attention_output.weight", {H, A * D}, Cut::columns, residual, attended);
  add(prefix + "mlp_norm.weight", {H}, ones);
  add_cut(prefix + "gate_up.weight", {2 * F, H}, Cut::rows, normal, gate_and_up);
  add_cut(prefix + "down.weight", {H, F}, Cut::columns, residual, hidden);
  end_unit();
}

void ParameterTable::begin_unit(std::string name) {
  units_.push_back({.name = std::move(name), .begin = flat_elements_, .first = parameters_.size()});
}

void ParameterTable::end_unit() {
  ParameterUnit& unit = units_.back();
  flat_elements_ = unit.begin + round_up(flat_elements_ - unit.begin, kParameterAlignment * share_.shards);
  unit.end = flat_elements_;
  unit.last = parameters_.size();
}

Parameter& ParameterTable::add(std::string name, const Shape& whole, const Start& start) {
  by_name_.emplace(name, parameters_.size());
  Parameter& parameter = parameters_.emplace_back();
  parameter.name = std::move(name);
  parameter.whole = parameter.shape = whole;
  parameter.sections = {{.length = whole[0], .owned = share_.tensor_rank == 0}};
  // Under sequence parallelism a rank's norms see only its share of the tokens.
  if (share_.sequence_parallel && share_.tensor_size > 1) parameter.tensor_gradient = TensorGradient::partial;
  parameter.initialisation = start.initialisation;
  parameter.std = start.std;
  parameter.decay = start.decay;
  parameter.offset = flat_elements_;
  parameter.unit = units_.size() - 1;
  flat_elements_ = round_up(flat_elements_ + whole.numel(), kParameterAlignment);
  return parameter;
}

template <typename Sections>
Parameter& ParameterTable::add_cut(std::string name, const Shape& whole, Cut cut, const Start& start,
                                   Sections&& sections) {
  Parameter& parameter = add(std::move(name), whole, start);
  if (share_.tensor_size == 1) return parameter;
  const int dim = cut == Cut::rows ? 0 : 1;
  const int64_t others = whole.numel() / whole[dim];
  int64_t room = 0;
  for (int rank = 0; rank < share_.tensor_size; ++rank) room = std::max(room, section_total(sections(rank)) * others);
  parameter.cut = cut;
  parameter.sections = sections(share_.tensor_rank);
  parameter.shape[dim] = section_total(parameter.sections);
  parameter.tensor_gradient = TensorGradient::complete;
  flat_elements_ = round_up(parameter.offset + room, kParameterAlignment);
  return parameter;
}

int64_t ParameterTable::parameter_count() const {
  int64_t count = 0;
  for (const Parameter& parameter : parameters_) count += parameter.shape.numel();
  return count;
}

const Parameter& ParameterTable::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  FARSPAN_CHECK(found != by_name_.end(), "parameter table: no parameter {}", name);
  return parameters_[found->second];
}

size_t ParameterTable::unit_named(std::string_view name) const {
  const auto found =
      std::find_if(units_.begin(), units_.end(), [&](const ParameterUnit& unit) { return unit.name == name; });
  FARSPAN_CHECK(found != units_.end(), "parameter table: this stage has no unit {}", name);
  return static_cast<size_t>(found - units_.begin());
}

size_t ParameterTable::layer_unit(int64_t layer) const {
  return find(fmt::format("layers.{}.attention_norm.weight", layer)).unit;
}

size_t ParameterTable::head_unit() const { return contains("head.weight") ? unit_named("head") : embedding_unit(); }

LayerTensors layer_tensors(const ParameterTable& table, int64_t layer, const Tensor& unit) {
  const std::string prefix = fmt::format("layers.{}.", layer);
  const int64_t begin = table.units()[table.layer_unit(layer)].begin;
  const auto get = [&](const char* name) {
    if (!table.contains(prefix + name)) return Tensor();
    const Parameter& parameter = table.find(prefix + name);
    const int64_t at = parameter.offset - begin;
    return unit.slice(0, at, at + parameter.shape.numel()).reshape(parameter.shape);
  };
  return {.attention_norm = get("attention_norm.weight"),
          .qkv = get("qkv.weight"),
          .qkv_bias = get("qkv.bias"),
          .query_norm = get("query_norm.weight"),
          .key_norm = get("key_norm.weight"),
          .attention_output = get("attention_output.weight"),
          .mlp_norm = get("mlp_norm.weight"),
          .gate_up = get("gate_up.weight"),
          .down = get("down.weight"),
          .amax = {}};
}

Tensor lone_tensor(const ParameterTable& table, size_t unit, const Tensor& flat_of_unit) {
  const Parameter& parameter = table.parameters_of(table.units()[unit]).front();
  return flat_of_unit.slice(0, 0, parameter.shape.numel()).reshape(parameter.shape);
}

namespace {

// Index in the whole parameter of element `i` of the part.
class WholeIndex {
 public:
  explicit WholeIndex(const Parameter& parameter)
      : sections_(parameter.sections),
        cut_(parameter.cut),
        part_columns_(parameter.shape.numel() / parameter.shape[0]),
        whole_columns_(parameter.whole.numel() / parameter.whole[0]) {}
  int64_t operator()(int64_t i) const {
    const int64_t row = i / part_columns_;
    const int64_t column = i % part_columns_;
    return cut_ == Cut::columns ? row * whole_columns_ + along(column) : along(row) * whole_columns_ + column;
  }

 private:
  int64_t along(int64_t part_index) const {
    for (const Section& section : sections_)
      if (part_index < section.part_begin + section.length)
        return section.whole_begin + part_index - section.part_begin;
    return part_index;
  }
  const std::vector<Section>& sections_;
  Cut cut_;
  int64_t part_columns_;
  int64_t whole_columns_;
};

}  // namespace

void initialise_part(Device& device, const Parameter& parameter, int64_t seed, int64_t begin, int64_t end,
                     float* values) {
  if (device.dry()) return;
  switch (parameter.initialisation) {
    case Initialisation::zeros:
      std::fill_n(values, end - begin, 0.0f);
      break;
    case Initialisation::ones:
      std::fill_n(values, end - begin, 1.0f);
      break;
    case Initialisation::normal: {
      const Philox random(static_cast<uint64_t>(seed), parameter.name);
      const WholeIndex whole(parameter);
      parallel_for(device, end - begin, 1 << 14, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i)
          values[i] = static_cast<float>(parameter.std * random.normal(static_cast<uint64_t>(whole(begin + i))));
      });
      break;
    }
  }
}

}  // namespace farspan
