// SPDX-License-Identifier: Apache-2.0
#include "optim/unit_gradients.h"

#include <utility>

namespace farspan {

UnitGradients::UnitGradients(Device& device, Arena& arena, const ParameterTable& table, GradientPlace place)
    : device_(device), arena_(arena), table_(table), taken_(table.units().size()), opened_(table.units().size()) {
  if (place == GradientPlace::taken_when_opened) return;
  resident_ = arena.take("gradients", DType::f32, {table.flat_elements()}, Purpose::gradients);
  for (size_t unit = 0; unit < taken_.size(); ++unit) clear_padding(unit);
}

ParameterAccess::Gradient UnitGradients::open(size_t unit) {
  if (opened_[unit]) return {of(unit), Accumulate::yes};
  opened_[unit] = true;
  if (!resident_.taken()) {
    taken_[unit] = arena_.take("gradients.unit", DType::f32, {table_.units()[unit].length()}, Purpose::gradients);
    clear_padding(unit);
  }
  return {of(unit), Accumulate::no};
}

Tensor UnitGradients::of(size_t unit) const {
  const ParameterUnit& place = table_.units()[unit];
  return resident_.taken() ? resident_.tensor().slice(0, place.begin, place.end) : taken_[unit].tensor();
}

Buffer UnitGradients::release(size_t unit) {
  opened_[unit] = false;
  return std::move(taken_[unit]);
}

// What lies between a unit's parameters and behind them, which no layer writes and sums over ranks read.
void UnitGradients::clear_padding(size_t unit) const {
  const ParameterUnit& place = table_.units()[unit];
  const Tensor flat = of(unit);
  int64_t end = 0;
  const auto clear_until = [&](int64_t begin) {
    if (begin > end) fill(device_, flat.slice(0, end, begin), 0);
  };
  for (const Parameter& parameter : table_.parameters_of(place)) {
    clear_until(parameter.offset - place.begin);
    end = parameter.offset - place.begin + parameter.shape.numel();
  }
  clear_until(place.length());
}

}  // namespace farspan
