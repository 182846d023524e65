// SPDX-License-Identifier: Apache-2.0
// Where the gradient of each unit lies, f32, from the first share that a backward writes until nobody reads it.
//
// What several programs of a step add to is resident, in one flat buffer. What one program fills and uses up is taken
// from the arena when a unit is first opened, and its owner releases it: a layer's gradient then lies where the layers
// behind it kept their activations.
#pragma once

#include <vector>

#include "memory/arena.h"
#include "model/parameter_access.h"

namespace farspan {

enum class GradientPlace { resident, taken_when_opened };

class UnitGradients {
 public:
  // The table outlives the gradients.
  UnitGradients(Device& device, Arena& arena, const ParameterTable& table, GradientPlace place);

  // With Accumulate::no for the first since the unit was released.
  ParameterAccess::Gradient open(size_t unit);
  // The unit's flat elements; of one not opened the resident ones alone.
  Tensor of(size_t unit) const;
  // It holds nothing any more. Returns the buffer that it lay in, unless that is resident.
  Buffer release(size_t unit);

 private:
  void clear_padding(size_t unit) const;

  Device& device_;
  Arena& arena_;
  const ParameterTable& table_;
  Buffer resident_;            // (N)
  std::vector<Buffer> taken_;  // (unit), while open or holding something
  std::vector<bool> opened_;
};

}  // namespace farspan
