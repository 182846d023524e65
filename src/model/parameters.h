// SPDX-License-Identifier: Apache-2.0
// The parameter table: every weight of a Llama-family decoder by name, in one fixed order, as slices of one flat
// buffer. Weights, gradients and optimizer moments all use the same offsets, so a flat buffer can be summed over ranks
// in one go.
//
// Linear weights are (outputs, inputs). The fused query/key/value weight holds the rows of all query heads, then of all
// key heads, then of all value heads; gate_up holds the gate's rows, then the up projection's.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "config/config.h"
#include "device/device.h"
#include "tensor/tensor.h"

namespace farspan {

enum class Initialisation { zeros, ones, normal };

struct Parameter {
  std::string name;
  Shape shape;
  Initialisation initialisation = Initialisation::normal;
  double std = 0;      // of a normal start
  bool decay = true;   // weight decay applies; not to norms and biases
  int64_t offset = 0;  // elements from the start of a flat buffer; a multiple of kParameterAlignment
};

inline constexpr int64_t kParameterAlignment = 32;  // elements: one cache line even in bf16

class ParameterTable {
 public:
  // `config` resolved: every size filled in, vocab_size too.
  explicit ParameterTable(const ModelConfig& config);

  const std::vector<Parameter>& parameters() const { return parameters_; }
  int64_t flat_elements() const { return flat_elements_; }  // padding between parameters included
  int64_t parameter_count() const;                          // padding not included
  bool contains(const std::string& name) const { return by_name_.contains(name); }
  const Parameter& find(const std::string& name) const;  // throws InternalError
  Tensor view(const Tensor& flat, const Parameter& parameter) const;

 private:
  void add(std::string name, Shape shape, Initialisation initialisation, double std, bool decay);
  std::vector<Parameter> parameters_;
  std::unordered_map<std::string, size_t> by_name_;
  int64_t flat_elements_ = 0;
};

// One layer's weights, or their gradients, as views of a flat buffer. Undefined where the model has none.
struct LayerTensors {
  Tensor attention_norm;    // (H)
  Tensor qkv;               // ((A + 2 K) D, H)
  Tensor qkv_bias;          // ((A + 2 K) D)
  Tensor query_norm;        // (D)
  Tensor key_norm;          // (D)
  Tensor attention_output;  // (H, A D)
  Tensor mlp_norm;          // (H)
  Tensor gate_up;           // (2 F, H)
  Tensor down;              // (H, F)
};

struct ModelTensors {
  Tensor embedding;  // (V, H)
  std::vector<LayerTensors> layers;
  Tensor final_norm;  // (H)
  Tensor head;        // (V, H); the embedding itself when tied
};

ModelTensors model_tensors(const ParameterTable& table, const ModelConfig& config, const Tensor& flat);

// Writes the start values of every parameter into `flat` (f32). Each depends on (seed, name, index in the parameter)
// only, never on layout, rank or thread count.
void initialise_parameters(Device& device, const ParameterTable& table, int64_t seed, Tensor flat);

}  // namespace farspan
