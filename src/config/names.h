// SPDX-License-Identifier: Apache-2.0
// How the choices of the configuration are spelt: in files, in flags, in messages.
#pragma once

#include <span>
#include <string_view>

#include "config/config.h"

namespace farspan {

template <typename Choice>
struct NamedChoice {
  std::string_view name;
  Choice choice;
};

// All spellings of one kind of choice, in the order in which help lists them.
template <typename Choice>
std::span<const NamedChoice<Choice>> choices();

template <>
std::span<const NamedChoice<RopeScalingType>> choices();
template <>
std::span<const NamedChoice<CpCommType>> choices();
template <>
std::span<const NamedChoice<CpLayout>> choices();
template <>
std::span<const NamedChoice<DataFormat>> choices();
template <>
std::span<const NamedChoice<Precision>> choices();
template <>
std::span<const NamedChoice<DeviceChoice>> choices();
template <>
std::span<const NamedChoice<OptimizerKind>> choices();
template <>
std::span<const NamedChoice<LrDecay>> choices();
template <>
std::span<const NamedChoice<Recompute>> choices();
template <>
std::span<const NamedChoice<Backend>> choices();

// choice_name(CpCommType::a2a_p2p) is "a2a+p2p".
template <typename Choice>
std::string_view choice_name(Choice wanted) {
  for (const NamedChoice<Choice>& named : choices<Choice>()) {
    if (named.choice == wanted) return named.name;
  }
  return "?";
}

}  // namespace farspan
