// SPDX-License-Identifier: Apache-2.0
// How a pass over the layers gets at weights and gradients, unit by unit, without knowing whether they are resident,
// gathered for the moment (ZeRO 3), or summed over ranks as soon as they are complete (ZeRO 2). Every rank of a
// data-parallel group opens and closes the same units in the same order.
#pragma once

#include <cstddef>

#include "model/parameters.h"
#include "ops/elementwise.h"

namespace farspan {

class ParameterAccess {
 public:
  explicit ParameterAccess(const ParameterTable& table) : table_(table) {}
  virtual ~ParameterAccess() = default;
  const ParameterTable& table() const { return table_; }

  // The unit will be opened next: a gather may begin.
  virtual void expect_weights(size_t unit) = 0;
  // The unit's flat elements in the compute dtype, readable until close_weights.
  virtual Tensor open_weights(size_t unit) = 0;
  virtual void close_weights(size_t unit) = 0;
  // The largest magnitudes of an open layer's matrices (LayerTensors::amax); undefined where nobody needs them.
  virtual Tensor weight_amax(size_t /*unit*/, const LayerTensors& /*weights*/) { return {}; }

  // The unit's flat gradient (f32), to be added to until close_gradient: then this micro-batch's share is complete
  // (one of ParameterUnit::gradient_uses). With Accumulate::no it holds nothing yet and is to be written, all of it.
  struct Gradient {
    Tensor flat;
    Accumulate use = Accumulate::yes;
  };
  virtual Gradient open_gradient(size_t unit) = 0;
  virtual void close_gradient(size_t unit) = 0;

 private:
  const ParameterTable& table_;
};

// A unit's weights while they are in scope.
class OpenWeights {
 public:
  OpenWeights(ParameterAccess& access, size_t unit) : access_(access), unit_(unit), flat_(access.open_weights(unit)) {}
  ~OpenWeights() { access_.close_weights(unit_); }
  OpenWeights(const OpenWeights&) = delete;
  OpenWeights& operator=(const OpenWeights&) = delete;
  const Tensor& flat() const { return flat_; }
  LayerTensors layer(int64_t index) const {
    LayerTensors weights = layer_tensors(access_.table(), index, flat_);
    weights.amax = access_.weight_amax(unit_, weights);
    return weights;
  }
  Tensor lone() const { return lone_tensor(access_.table(), unit_, flat_); }

 private:
  ParameterAccess& access_;
  size_t unit_;
  Tensor flat_;
};

// A unit's gradient while a backward adds to it. `close` tells that the share is complete; it may communicate and
// throw, which a destructor must not.
class OpenGradient {
 public:
  OpenGradient(ParameterAccess& access, size_t unit)
      : access_(access), unit_(unit), gradient_(access.open_gradient(unit)) {}
  OpenGradient(const OpenGradient&) = delete;
  OpenGradient& operator=(const OpenGradient&) = delete;
  LayerGradients layer(int64_t index) const {
    return {layer_tensors(access_.table(), index, gradient_.flat), gradient_.use};
  }
  Tensor lone() const { return lone_tensor(access_.table(), unit_, gradient_.flat); }
  Accumulate use() const { return gradient_.use; }
  // lone(), set to zero where it holds nothing yet: for ops that only add.
  Tensor zeroed_lone(Device& device) const {
    if (gradient_.use == Accumulate::no) fill(device, lone(), 0);
    return lone();
  }
  void close() { access_.close_gradient(unit_); }

 private:
  ParameterAccess& access_;
  size_t unit_;
  ParameterAccess::Gradient gradient_;
};

}  // namespace farspan
