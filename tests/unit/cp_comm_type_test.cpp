// SPDX-License-Identifier: Apache-2.0
// Which communication types the heads allow, how two levels are cut, and what auto chooses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <vector>

#include "base/error.h"
#include "config/names.h"
#include "parallel/context/choose_cp_comm_type.h"
#include "plan/machine.h"

namespace farspan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// GPUs of one host, and of several.
const CpRates kHost = cp_rates(DeviceKind::cuda, DType::bf16, 8);
const CpRates kGpu = cp_rates(DeviceKind::cuda, DType::bf16, 16);

std::vector<CpCost> costs_of(int64_t seq_length, int cp, int64_t heads, int64_t kv_heads, const CpRates& rates) {
  const SequenceLayout layout(CpLayout::zigzag, seq_length, cp);
  const auto costs = cp_costs(layout, {.heads = heads, .kv_heads = kv_heads, .head_dim = 128}, DType::bf16,
                              hierarchical_sizes({}, cp, heads, kv_heads), rates);
  return {costs.begin(), costs.end()};
}

CpCommType chosen(int64_t seq_length, int cp, int64_t heads, int64_t kv_heads, const CpRates& rates) {
  return choose_cp_comm_type(CpCommType::automatic, SequenceLayout(CpLayout::zigzag, seq_length, cp),
                             {.heads = heads, .kv_heads = kv_heads, .head_dim = 128}, DType::bf16, {}, rates);
}

TEST(CpCommType, B009_TheProductMustDivideTheHeads) {
  EXPECT_FALSE(refuse_a2a(4, 4, 4));
  EXPECT_FALSE(refuse_a2a(4, 4, 2, 2));
  const auto reason = refuse_a2a(4, 4, 4, 2);
  ASSERT_TRUE(reason);
  EXPECT_THAT(*reason, HasSubstr("2 * 4 = 8 ranks"));
  EXPECT_THAT(*reason, HasSubstr("1 or 2"));
  EXPECT_THAT(refuse_a2a(28, 4, 8).value(), HasSubstr("28 query heads"));
  EXPECT_THAT(refuse_a2a(28, 4, 8).value(), HasSubstr("1, 2, 4 or 28"));
}

TEST(CpCommType, SharedKeyValueHeadsAreAllowed) {
  EXPECT_FALSE(refuse_a2a(8, 2, 4));
  EXPECT_FALSE(refuse_a2a(32, 1, 32));
  EXPECT_TRUE(refuse_a2a(12, 3, 2)) << "queries of one rank would use unequal parts of two groups";
}

TEST(CpCommType, TwoLevels) {
  const HierarchicalSizes sizes = hierarchical_sizes(std::vector<int64_t>{2, 4}, 8, 8, 2);
  EXPECT_EQ(sizes.inner, 2);
  EXPECT_THAT(inner_groups(sizes),
              ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3), ElementsAre(4, 5), ElementsAre(6, 7)));
  EXPECT_THAT(outer_groups(sizes), ElementsAre(ElementsAre(0, 2, 4, 6), ElementsAre(1, 3, 5, 7)));
}

TEST(CpCommType, LevelsThatAreNotGivenAreDerived) {
  EXPECT_EQ(hierarchical_sizes({}, 16, 32, 8).inner, 8);
  EXPECT_EQ(hierarchical_sizes({}, 16, 32, 8, 4).inner, 4) << "four ranks a host";
  EXPECT_EQ(hierarchical_sizes({}, 8, 32, 8).inner, 4) << "two levels where they can be";
  EXPECT_EQ(hierarchical_sizes({}, 6, 12, 3).inner, 3);
  EXPECT_EQ(hierarchical_sizes({}, 5, 4, 2).inner, 1);
}

TEST(CpCommType, LevelsThatDoNotFitAreRefused) {
  const auto error_of = [](const std::vector<int64_t>& given) {
    try {
      hierarchical_sizes(given, 8, 12, 3);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(error_of({2, 2}), HasSubstr("[2, 2] found; their product must be context_parallel_size, 8"));
  EXPECT_THAT(error_of({8}), HasSubstr("give two"));
  EXPECT_THAT(error_of({0, 8}), HasSubstr("product"));
  EXPECT_THAT(error_of({4, 2}), HasSubstr("12 query heads and 3 key/value heads"));
}

TEST(CpCommType, AskedForIsTaken) {
  for (CpCommType type : {CpCommType::p2p, CpCommType::all_gather, CpCommType::a2a, CpCommType::a2a_p2p})
    EXPECT_EQ(choose_cp_comm_type(type, SequenceLayout(CpLayout::zigzag, 64, 8),
                                  {.heads = 3, .kv_heads = 3, .head_dim = 8}, DType::f32),
              type);
}

TEST(CpCommType, AutoNeverTakesWhatIsRefused) {
  for (int cp : {2, 3, 4, 5, 6, 7, 8, 16, 64})
    for (int64_t heads : {1, 5, 12, 32})
      for (int64_t seq_length : {int64_t{64}, int64_t{8192}, int64_t{1} << 20})
        for (const CpRates& rates : {CpRates{}, kHost, kGpu}) {
          const CpCommType type = chosen(seq_length, cp, heads, 1, rates);
          for (const CpCost& cost : costs_of(seq_length, cp, heads, 1, rates))
            EXPECT_FALSE(cost.type == type && cost.refused) << choice_name(type) << " cp " << cp << " heads " << heads;
        }
}

// 14 A D pairs FLOP of attention; keys and values twice and their fp32 gradients once, all but the rank's own.
TEST(CpCommType, CostsFollowTheFormulas) {
  const std::vector<CpCost> costs = costs_of(8192, 4, 32, 8, kGpu);
  const double pairs = 0.5 * 8192 * 8192 / 4;
  for (const CpCost& cost : costs)
    EXPECT_NEAR(cost.attention_seconds, 14 * 32 * 128 * pairs / 535e12, 1e-12) << choice_name(cost.type);
  const double keys = 3 * 2048.0 * 2 * 8 * 128 * 2;
  EXPECT_EQ(costs[0].received_bytes, 2 * keys + 2 * keys);
  EXPECT_EQ(costs[1].received_bytes, costs[0].received_bytes);
  const double trade_forward = (2 * 8 + 2 * 2) * 128 * 2 + 4 * 8;
  const double trade_backward = (3 * 8 + 2 * 2) * 128 * 2 + 8 * 8 + 2 * 2 * 128 * 2;
  EXPECT_EQ(costs[2].received_bytes, 3 * 2048 * (trade_forward + trade_backward));
  // p2p: bf16 keys and values of what is sent, two pieces of two hops each and their fp32 gradients and one more; fp32
  // sums of d_query, d_key, d_value. On a CPU three pieces of a quarter.
  const double sums = 2048 * 4 * (32 + 2 * 8) * 128;
  EXPECT_EQ(costs[0].working_bytes, 2 * 8 * 128 * (2048 * 2 + 4096 * (2 * 2 + 3 * 4)) + sums);
  EXPECT_EQ(costs_of(8192, 4, 32, 8, {})[0].working_bytes, 3 * 512 * 2 * 8 * 128 * (2 + 4) + sums);
}

// Of 4 ranks' attention of 8 s, 2 hide the first arrival, and 6 the others.
TEST(CpCommType, WhatAttentionDoesNotHide) {
  EXPECT_EQ(exposed_arrivals(8, 8, 4, 4), 0 + 3 * (2 - 1.5));
  EXPECT_EQ(exposed_arrivals(12, 8, 4, 4), (3 - 2) + 3 * (3 - 1.5));
  EXPECT_EQ(exposed_arrivals(4, 8, 4, 1), 4 - 2);
  EXPECT_EQ(exposed_arrivals(6, 8, 4, 4), 0);
}

TEST(CpCommType, RatesAreThoseOfTheDevice) {
  EXPECT_EQ(cp_rates(DeviceKind::cpu, DType::f32, 64).attention_flops, CpRates{}.attention_flops);
  EXPECT_EQ(kHost.pieces.most_hops, 2);
  EXPECT_GT(kHost.link_bandwidth, 5 * kGpu.link_bandwidth);
}

TEST(CpCommType, RatesOfGpusAreThePlans) {
  for (const auto& [precision, dtype] : {std::pair{Precision::bf16, DType::bf16}, {Precision::fp32, DType::f32}}) {
    const Machine machine = gpu_machine("NVIDIA H200", precision, 128, 1);
    const CpRates rates = cp_rates(DeviceKind::cuda, dtype, 8);
    EXPECT_NEAR(rates.attention_flops, machine.attention_flops, 0.01 * machine.attention_flops);
    EXPECT_EQ(rates.memory_bandwidth, machine.memory_bandwidth);
    EXPECT_EQ(rates.link_bandwidth, machine.link_bandwidth);
    EXPECT_EQ(kGpu.link_bandwidth, machine.network_bandwidth);
  }
}

// Long rows: attention hides what travels, and p2p holds the least. Short ones: few meetings. Many key/value heads:
// trading heads moves less than sending all keys round; where the degree does not divide the heads, two levels.
TEST(CpCommType, AutoFollowsWhatIsScarce) {
  EXPECT_EQ(chosen(131072, 8, 32, 8, {}), CpCommType::p2p);
  EXPECT_EQ(chosen(131072, 2, 16, 8, kHost), CpCommType::p2p);
  EXPECT_EQ(chosen(1 << 20, 8, 32, 8, kHost), CpCommType::p2p);
  EXPECT_EQ(chosen(1 << 20, 8, 32, 8, kGpu), CpCommType::p2p);
  EXPECT_EQ(chosen(256, 8, 28, 4, {}), CpCommType::all_gather);
  EXPECT_EQ(chosen(131072, 8, 32, 8, kHost), CpCommType::all_gather) << "p2p's two hops a step hold more";
  EXPECT_EQ(chosen(8192, 8, 32, 8, kHost), CpCommType::a2a);
  EXPECT_EQ(chosen(32768, 16, 32, 32, kGpu), CpCommType::a2a);
  EXPECT_EQ(chosen(32768, 16, 28, 4, kGpu), CpCommType::a2a_p2p);
}

}  // namespace
}  // namespace farspan
