// SPDX-License-Identifier: Apache-2.0
// What context-parallel attention costs: bytes on the wire and bytes of memory, against the formulas of its header;
// what it refuses; and how `auto` chooses.
#include <gmock/gmock.h>

#include "tests/ranks/attention_case.h"

namespace farspan::test {
namespace {

using ::testing::HasSubstr;

constexpr CpCommType kCommTypes[] = {CpCommType::p2p, CpCommType::all_gather};
constexpr CpLayout kLayouts[] = {CpLayout::zigzag, CpLayout::contiguous};

// Two rows; the documents leave many blocks empty, which changes what is computed, not what is sent.
AttentionCase two_rows(int64_t seq_length) {
  return {.seq_length = seq_length,
          .documents = {{{0, seq_length}}, documents_of({1, seq_length / 3, seq_length / 2})}};
}

int64_t local_elements(const AttentionCase& c, const RankSetup& setup) {
  const SequenceLayout layout(setup.layout, c.seq_length, setup.cp);
  return c.rows() * layout.local_length() * c.kv_heads * c.head_dim;
}

int64_t bytes_of(const MemoryPlan& plan, std::string_view program, Purpose purpose) {
  int64_t live = 0, largest = 0;
  for (const PlannedProgram& p : plan.programs) {
    if (p.name != program) continue;
    for (const ArenaEvent& event : p.events) {
      const PlannedBuffer& buffer = p.buffers[static_cast<size_t>(event.buffer)];
      if (buffer.purpose != purpose) continue;
      live += event.release ? -buffer.bytes : buffer.bytes;
      largest = std::max(largest, live);
    }
  }
  return largest;
}

TEST(ContextAttentionCost, BytesReceivedEqualTheFormulas) {
  const AttentionCase c = two_rows(45);
  for (int cp : {1, 2, 3, 8})
    for (DType dtype : {DType::f32, DType::bf16})
      for (CpCommType comm_type : kCommTypes)
        for (CpLayout layout : kLayouts) {
          const RankSetup setup{.cp = cp, .comm_type = comm_type, .layout = layout, .dtype = dtype};
          const int64_t forward = (cp - 1) * 2 * local_elements(c, setup) * size_of(dtype);
          const int64_t backward = (cp - 1) * 2 * local_elements(c, setup) * (size_of(dtype) + 4);
          const RankRun run = run_on_ranks(c, random_inputs(c, dtype), setup);
          for (int rank = 0; rank < cp; ++rank) {
            const auto r = static_cast<size_t>(rank);
            EXPECT_EQ(run.forward[r].bytes_received, forward) << "cp " << cp << " rank " << rank;
            EXPECT_EQ(run.forward[r].bytes_sent, forward);
            EXPECT_EQ(run.backward[r].bytes_received, backward);
            EXPECT_EQ(run.backward[r].bytes_sent, backward);
            Traffic dry_forward, dry_backward;
            plan_rank(c, setup, rank, &dry_forward, &dry_backward);
            EXPECT_EQ(dry_forward.bytes_received, forward) << "dry run";
            EXPECT_EQ(dry_backward.bytes_received, backward) << "dry run";
          }
        }
}

// 1024 tokens of 2 key/value heads of size 64 in bf16, keys and values; expanded to the 8 query heads it would be 4
// times.
TEST(ContextAttentionCost, B028_KeyValueHeadsAreNotExpanded) {
  const AttentionCase c{.seq_length = 4096, .heads = 8, .kv_heads = 2, .head_dim = 64, .documents = {{{0, 4096}}}};
  Traffic forward;
  plan_rank(c, {.cp = 4, .dtype = DType::bf16}, 0, &forward);
  EXPECT_EQ(forward.bytes_sent, 3 * 524288);
  EXPECT_EQ(forward.calls, 3);
}

TEST(ContextAttentionCost, RingMemoryDoesNotDependOnTheGroup) {
  constexpr int64_t kLocalTokens = 24;
  for (DType dtype : {DType::f32, DType::bf16})
    for (CpLayout layout : kLayouts) {
      std::vector<int64_t> peaks;
      for (int cp : {2, 4, 8}) {
        const AttentionCase c = two_rows(kLocalTokens * cp);
        const RankSetup setup{.cp = cp, .layout = layout, .dtype = dtype};
        const MemoryPlan plan = plan_rank(c, setup, cp - 1);
        const int64_t elements = local_elements(c, setup);
        EXPECT_EQ(bytes_of(plan, "forward", Purpose::communication), 2 * 2 * elements * size_of(dtype));
        EXPECT_EQ(bytes_of(plan, "backward", Purpose::communication), 2 * 2 * elements * (size_of(dtype) + 4));
        // One fp32 output (bf16 only), as large as the query.
        EXPECT_EQ(bytes_of(plan, "forward", Purpose::workspace),
                  dtype == DType::f32 ? 0 : elements / c.kv_heads * c.heads * 4);
        peaks.push_back(plan.peak_bytes);
      }
      EXPECT_EQ(peaks[0], peaks[1]);
      EXPECT_EQ(peaks[0], peaks[2]);
    }
}

TEST(ContextAttentionCost, OneRankPacksAndSendsNothing) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    const MemoryPlan plan = plan_rank(two_rows(24), {.cp = 1, .dtype = dtype}, 0);
    EXPECT_EQ(bytes_of(plan, "forward", Purpose::communication), 0);
    EXPECT_EQ(bytes_of(plan, "backward", Purpose::communication), 0);
  }
}

// Plans are made before data is seen: what is taken, and in which order, must not depend on the mask.
TEST(ContextAttentionCost, TakesDoNotDependOnTheMask) {
  for (CpCommType comm_type : kCommTypes) {
    const RankSetup setup{.cp = 4, .comm_type = comm_type, .dtype = DType::bf16};
    AttentionCase packed = two_rows(40);
    AttentionCase padding = packed;
    padding.documents = {{}, {}};
    AttentionCase full = packed;
    full.rule.causal = false;
    const MemoryPlan plan = plan_rank(packed, setup, 1);
    for (const AttentionCase& other : {padding, full}) {
      const MemoryPlan found = plan_rank(other, setup, 1);
      ASSERT_EQ(found.programs.size(), plan.programs.size());
      for (size_t p = 0; p < plan.programs.size(); ++p) {
        ASSERT_EQ(found.programs[p].events.size(), plan.programs[p].events.size());
        for (size_t e = 0; e < plan.programs[p].events.size(); ++e) {
          EXPECT_EQ(found.programs[p].events[e].release, plan.programs[p].events[e].release);
          EXPECT_EQ(found.programs[p].events[e].buffer, plan.programs[p].events[e].buffer);
        }
        for (size_t i = 0; i < plan.programs[p].buffers.size(); ++i)
          EXPECT_EQ(found.programs[p].buffers[i].bytes, plan.programs[p].buffers[i].bytes);
      }
    }
  }
}

TEST(ContextAttentionCost, SchedulesThatAreNotHereAreRefusedByName) {
  const SequenceLayout layout(CpLayout::zigzag, 16, 2);
  const auto group = make_dry_communicator(Dimension::cp, 0, {0, 1});
  for (const auto& [type, name] : {std::pair{CpCommType::a2a, "a2a found"}, std::pair{CpCommType::a2a_p2p, "a2a+p2p"},
                                   std::pair{CpCommType::automatic, "auto"}}) {
    try {
      ContextAttention(*group, layout, {4, 2, 8, 1}, type);
      FAIL() << name << " was accepted";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr(name));
      EXPECT_THAT(error.what(), HasSubstr("p2p and all_gather"));
    }
  }
}

TEST(ContextAttentionCost, AutoGathersWhileTheGatherIsSmall) {
  auto chosen = [](int cp, int64_t heads, int64_t kv_heads) {
    return choose_cp_comm_type(CpCommType::automatic, SequenceLayout(CpLayout::zigzag, 4096, cp),
                               {heads, kv_heads, 64, 1}, DType::bf16);
  };
  EXPECT_EQ(chosen(2, 32, 8), CpCommType::all_gather);  // 2 * 2 * 8 * 6 = 192 against 32 * 10 = 320
  EXPECT_EQ(chosen(4, 32, 8), CpCommType::p2p);         // 384
  EXPECT_EQ(chosen(8, 32, 2), CpCommType::all_gather);  // 192
  EXPECT_EQ(chosen(2, 32, 32), CpCommType::p2p);        // 768
  EXPECT_EQ(choose_cp_comm_type(CpCommType::p2p, SequenceLayout(CpLayout::zigzag, 64, 2), {32, 2, 64, 1}, DType::f32),
            CpCommType::p2p);
}

}  // namespace
}  // namespace farspan::test
