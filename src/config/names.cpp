// SPDX-License-Identifier: Apache-2.0
#include "config/names.h"

namespace farspan {

template <>
std::span<const NamedChoice<RopeScalingType>> choices() {
  static constexpr NamedChoice<RopeScalingType> kNames[] = {{"none", RopeScalingType::none},
                                                            {"linear", RopeScalingType::linear},
                                                            {"ntk", RopeScalingType::ntk},
                                                            {"yarn", RopeScalingType::yarn},
                                                            {"llama3", RopeScalingType::llama3}};
  return kNames;
}

template <>
std::span<const NamedChoice<CpCommType>> choices() {
  static constexpr NamedChoice<CpCommType> kNames[] = {{"p2p", CpCommType::p2p},
                                                       {"all_gather", CpCommType::all_gather},
                                                       {"a2a", CpCommType::a2a},
                                                       {"a2a+p2p", CpCommType::a2a_p2p},
                                                       {"auto", CpCommType::automatic}};
  return kNames;
}

template <>
std::span<const NamedChoice<CpLayout>> choices() {
  static constexpr NamedChoice<CpLayout> kNames[] = {
      {"zigzag", CpLayout::zigzag}, {"contiguous", CpLayout::contiguous}, {"balanced", CpLayout::balanced}};
  return kNames;
}

template <>
std::span<const NamedChoice<DataFormat>> choices() {
  static constexpr NamedChoice<DataFormat> kNames[] = {{"text", DataFormat::text},
                                                       {"jsonl", DataFormat::jsonl},
                                                       {"fasta", DataFormat::fasta},
                                                       {"megatron", DataFormat::megatron},
                                                       {"tokens", DataFormat::tokens}};
  return kNames;
}

template <>
std::span<const NamedChoice<Precision>> choices() {
  static constexpr NamedChoice<Precision> kNames[] = {
      {"fp32", Precision::fp32}, {"bf16", Precision::bf16}, {"fp8", Precision::fp8}};
  return kNames;
}

template <>
std::span<const NamedChoice<DeviceChoice>> choices() {
  static constexpr NamedChoice<DeviceChoice> kNames[] = {
      {"auto", DeviceChoice::automatic}, {"cpu", DeviceChoice::cpu}, {"cuda", DeviceChoice::cuda}};
  return kNames;
}

template <>
std::span<const NamedChoice<OptimizerKind>> choices() {
  static constexpr NamedChoice<OptimizerKind> kNames[] = {{"adamw", OptimizerKind::adamw}, {"sgd", OptimizerKind::sgd}};
  return kNames;
}

template <>
std::span<const NamedChoice<LrDecay>> choices() {
  static constexpr NamedChoice<LrDecay> kNames[] = {
      {"constant", LrDecay::constant}, {"linear", LrDecay::linear}, {"cosine", LrDecay::cosine}};
  return kNames;
}

template <>
std::span<const NamedChoice<Recompute>> choices() {
  static constexpr NamedChoice<Recompute> kNames[] = {{"none", Recompute::none},
                                                      {"selective", Recompute::selective},
                                                      {"full", Recompute::full},
                                                      {"auto", Recompute::automatic}};
  return kNames;
}

template <>
std::span<const NamedChoice<Backend>> choices() {
  static constexpr NamedChoice<Backend> kNames[] = {
      {"auto", Backend::automatic}, {"threads", Backend::threads}, {"mpi", Backend::mpi}, {"nccl", Backend::nccl}};
  return kNames;
}

}  // namespace farspan
