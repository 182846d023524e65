// SPDX-License-Identifier: Apache-2.0
// The parameter table: every weight that one rank holds of a Llama-family decoder, by name, in one fixed order, as
// slices of one flat buffer.
//
// A rank holds the layers of its pipeline stage, and of each weight the part that tensor parallelism gives it. A part
// is cut along one dimension in sections: the fused query/key/value weight holds the rows of the rank's query heads,
// then of its key heads, then of its value heads; gate_up holds rows of the gate, then of the up projection. Linear
// weights are (outputs, inputs); column-parallel ones are cut by rows, row-parallel ones by columns, embedding and head
// by vocabulary. Where there are fewer key/value heads than tensor-parallel ranks, neighbours hold the same head.
// Source of the cuts: Shoeybi et al., Megatron-LM (2019), section 3.
//
// Parameters are grouped in units (the embedding, each layer, the final norm, the head): what is gathered, summed over
// data-parallel ranks, and cut among them under ZeRO, as one. Offsets are the same on every tensor-parallel rank.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "config/config.h"
#include "device/device.h"
#include "ops/accumulate.h"
#include "ops/amax.h"
#include "parallel/sequence_layout.h"
#include "tensor/tensor.h"

namespace farspan {

// What a rank holds of the model. The default is all of it.
struct ModelShare {
  int tensor_size = 1;
  int tensor_rank = 0;
  bool sequence_parallel = false;
  std::vector<Span> chunks;  // layers of this stage's model chunks, in order; empty: all layers
  bool first_stage = true;   // holds the embedding
  bool last_stage = true;    // holds final norm and head
  int shards = 1;            // how many ranks share a unit's state under ZeRO; units are padded to a multiple
};

enum class Initialisation { zeros, ones, normal };

// The type of activations and of the weights that layers read.
inline DType compute_dtype(Precision precision) { return precision == Precision::fp32 ? DType::f32 : DType::bf16; }

// Along which dimension a part is cut out of the whole.
enum class Cut { none, rows, columns };

// What a rank's gradient of a parameter still lacks after the sum over data- and context-parallel ranks.
enum class TensorGradient {
  complete,      // nothing: the part is this rank's alone, or every tensor-parallel rank has computed all of it
  partial,       // the sum over tensor-parallel ranks: each saw other heads or other tokens
  shared_heads,  // for the key and value sections, the sum over the ranks that hold the same head
};

// Rows (or columns) [whole_begin, whole_begin + length) of the whole, at part_begin of the part.
struct Section {
  int64_t whole_begin = 0;
  int64_t part_begin = 0;
  int64_t length = 0;
  bool owned = true;         // exactly one rank of the model owns an element: norms count it there, checkpoints save it
  bool shared_head = false;  // a key/value section that neighbours hold too
};

struct Parameter {
  std::string name;
  Shape whole;  // of the model's parameter
  Shape shape;  // of this rank's part
  Cut cut = Cut::none;
  std::vector<Section> sections;
  TensorGradient tensor_gradient = TensorGradient::complete;
  Initialisation initialisation = Initialisation::normal;
  double std = 0;      // of a normal start
  bool decay = true;   // weight decay applies; not to norms and biases
  int64_t offset = 0;  // elements from the start of a flat buffer; a multiple of kParameterAlignment
  size_t unit = 0;
};

// Elements that lie together in the part and in the whole.
struct ElementRun {
  int64_t part_begin = 0;
  int64_t whole_begin = 0;
  int64_t length = 0;
};
// What a section holds, in ascending order: one run of rows, or one run for every row of a cut by columns.
std::vector<ElementRun> element_runs(const Parameter& parameter, const Section& section);

// Consecutive parameters that travel together.
struct ParameterUnit {
  std::string name;   // "embedding", "layers.3", "final_norm", "head"
  int64_t begin = 0;  // elements of a flat buffer; the length is a multiple of shards * kParameterAlignment
  int64_t end = 0;
  size_t first = 0;  // parameters [first, last)
  size_t last = 0;
  int gradient_uses = 1;  // times a micro-batch adds to its gradient: a tied embedding gets two shares
  int64_t length() const { return end - begin; }
};

inline constexpr int64_t kParameterAlignment = 32;  // elements: one cache line even in bf16

class ParameterTable {
 public:
  // `config` resolved: every size filled in, vocab_size too.
  explicit ParameterTable(const ModelConfig& config, const ModelShare& share = {});

  const ModelShare& share() const { return share_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  const std::vector<ParameterUnit>& units() const { return units_; }
  std::span<const Parameter> parameters_of(const ParameterUnit& unit) const {
    return std::span(parameters_).subspan(unit.first, unit.last - unit.first);
  }
  int64_t flat_elements() const { return flat_elements_; }  // padding included
  int64_t parameter_count() const;                          // of this rank's parts, padding not included
  bool contains(const std::string& name) const { return by_name_.contains(name); }
  const Parameter& find(const std::string& name) const;  // throws InternalError

  // Units by place. `head_unit` is the embedding's own where weights are tied.
  size_t embedding_unit() const { return unit_named("embedding"); }
  size_t layer_unit(int64_t layer) const;
  size_t final_norm_unit() const { return unit_named("final_norm"); }
  size_t head_unit() const;

 private:
  struct Start {
    Initialisation initialisation = Initialisation::normal;
    double std = 0;
    bool decay = true;
  };
  void add_layer(const ModelConfig& config, int64_t layer);
  void begin_unit(std::string name);
  void end_unit();
  // `owned`: this rank's copy of what it does not share is the one that counts. Throws where the cut leaves a rank
  // nothing.
  Parameter& add(std::string name, const Shape& whole, const Start& start);
  // Cuts the parameter just added: `sections(rank)` lists a tensor-parallel rank's, so that room for the largest is
  // left.
  template <typename Sections>
  Parameter& add_cut(std::string name, const Shape& whole, Cut cut, const Start& start, Sections&& sections);
  size_t unit_named(std::string_view name) const;

  ModelShare share_;
  std::vector<Parameter> parameters_;
  std::vector<ParameterUnit> units_;
  std::unordered_map<std::string, size_t> by_name_;
  int64_t flat_elements_ = 0;
};

// Heads that a tensor-parallel rank computes: [begin, end) of the model's. Key/value heads are the rank's share, or the
// one that its query heads read where there are fewer heads than ranks.
Span query_heads_of(const ModelConfig& config, int tensor_size, int tensor_rank);
Span key_value_heads_of(const ModelConfig& config, int tensor_size, int tensor_rank);
// Vocabulary entries of a tensor-parallel rank; the first ranks hold one more where the size does not divide.
Span vocabulary_of(const ModelConfig& config, int tensor_size, int tensor_rank);

inline constexpr int64_t kLayerMatrices = 4;

// One layer's weights, or their gradients, as views of a unit's flat elements. Undefined where the model has none.
struct LayerTensors {
  Tensor attention_norm;    // (H)
  Tensor qkv;               // ((a + 2 k) D, H): a query heads and k key/value heads of this rank
  Tensor qkv_bias;          // ((a + 2 k) D)
  Tensor query_norm;        // (D)
  Tensor key_norm;          // (D)
  Tensor attention_output;  // (H, a D)
  Tensor mlp_norm;          // (H)
  Tensor gate_up;           // (2 f, H)
  Tensor down;              // (H, f)
  Tensor amax;              // (kLayerMatrices) f32, of the four matrices in this order; undefined: not measured

  std::array<Tensor, kLayerMatrices> matrices() const { return {qkv, attention_output, gate_up, down}; }
  Measured measured_qkv() const { return measured(0); }
  Measured measured_attention_output() const { return measured(1); }
  Measured measured_gate_up() const { return measured(2); }
  Measured measured_down() const { return measured(3); }

 private:
  Measured measured(int64_t index) const {
    return {matrices()[static_cast<size_t>(index)], amax.defined() ? amax.slice(0, index, index + 1) : Tensor()};
  }
};

// The gradients of a layer's weights. With Accumulate::no they hold nothing yet: the first product of a micro-batch
// overwrites a matrix's gradient, and what else there is has been set to zero.
struct LayerGradients : LayerTensors {
  Accumulate use = Accumulate::yes;
};

// `unit`: the layer's flat elements, weights or gradients.
LayerTensors layer_tensors(const ParameterTable& table, int64_t layer, const Tensor& unit);
// The one parameter of a unit that holds one: embedding (v, H), final norm (H), head (v, H).
Tensor lone_tensor(const ParameterTable& table, size_t unit, const Tensor& flat_of_unit);

// Writes the start values of elements [begin, end) of the part of `parameter` to `values` (f32). Each depends on (seed,
// name, index in the whole parameter) only, never on layout, rank or thread count.
void initialise_part(Device& device, const Parameter& parameter, int64_t seed, int64_t begin, int64_t end,
                     float* values);

}  // namespace farspan
