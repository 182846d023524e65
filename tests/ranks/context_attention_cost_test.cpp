// SPDX-License-Identifier: Apache-2.0
// What context-parallel attention costs: bytes on the wire and bytes of memory, against the formulas of its header, and
// what it refuses.
#include <gmock/gmock.h>

#include "parallel/context/key_schedule.h"
#include "tests/ranks/attention_case.h"

namespace farspan::test {
namespace {

using ::testing::HasSubstr;

constexpr CpCommType kCommTypes[] = {CpCommType::p2p, CpCommType::all_gather, CpCommType::a2a, CpCommType::a2a_p2p};
constexpr CpCommType kTravelTypes[] = {CpCommType::p2p, CpCommType::all_gather};
constexpr CpLayout kLayouts[] = {CpLayout::zigzag, CpLayout::contiguous, CpLayout::balanced};

// Dry runs stand in for either.
constexpr DeviceKind kDevices[] = {DeviceKind::cpu, DeviceKind::cuda};
std::string_view kind_name(DeviceKind kind) { return kind == DeviceKind::cuda ? "cuda" : "cpu"; }

AttentionCase two_rows(int64_t seq_length) {
  return {.seq_length = seq_length,
          .documents = {{{0, seq_length}}, documents_of({1, seq_length / 3, seq_length - 1 - seq_length / 3})}};
}

AttentionCase causal_row(int64_t seq_length) {
  return {.seq_length = seq_length, .documents = {documents_of({seq_length})}};
}

int64_t local_tokens(const AttentionCase& c, const RankSetup& setup) {
  return c.rows() * SequenceLayout(setup.layout, c.seq_length, setup.cp).local_length();
}

// Tokens of `owner` that some query of `reader` sees, counted pair by pair. With `members`, of groups of ranks.
int64_t tokens_seen(const AttentionCase& c, const RankSetup& setup, int reader, int owner, int members = 1) {
  const SequenceLayout layout(setup.layout, c.seq_length, setup.cp);
  int64_t tokens = 0;
  for (int64_t b = 0; b < c.rows(); ++b) {
    const RowLayout dealt = row_layout(layout, IntervalMask(c.documents[static_cast<size_t>(b)], c.rule));
    std::vector<int> group_of(static_cast<size_t>(layout.padded_length()));
    for (int rank = 0; rank < setup.cp; ++rank)
      for (int64_t i = 0; i < layout.local_length(); ++i)
        group_of[static_cast<size_t>(dealt.position(rank, i))] = rank / members;
    for (int64_t k = 0; k < c.seq_length; ++k) {
      if (group_of[static_cast<size_t>(k)] != owner) continue;
      for (int64_t q = 0; q < c.seq_length; ++q)
        if (group_of[static_cast<size_t>(q)] == reader && may_see(c, b, q, k)) {
          ++tokens;
          break;
        }
    }
  }
  return tokens;
}

// N: others' tokens that a rank (or group) sees. M: visits of others to its tokens.
struct Seen {
  int64_t by_me = 0;
  int64_t of_me = 0;
};

Seen seen(const AttentionCase& c, const RankSetup& setup, int me, int members = 1) {
  Seen sum;
  for (int other = 0; other < setup.cp / members; ++other) {
    if (other == me) continue;
    sum.by_me += tokens_seen(c, setup, me, other, members);
    sum.of_me += tokens_seen(c, setup, other, me, members);
  }
  return sum;
}

struct Bytes {
  int64_t forward = 0;
  int64_t backward = 0;
};

Bytes travel_bytes(const Seen& tokens, int64_t kv_heads, int64_t head_dim, DType dtype) {
  const int64_t keys = 2 * kv_heads * head_dim * size_of(dtype) * tokens.by_me;
  return {keys, keys + 8 * kv_heads * head_dim * tokens.of_me};
}

// n ranks with s tokens of all rows each. A GPU's attention in bf16 reads out where others read delta.
Bytes trade_bytes(const AttentionCase& c, int64_t n, int64_t s, DType dtype, DeviceKind of) {
  const int64_t b = size_of(dtype);
  const int64_t heads = c.heads / n;
  const int64_t kv_heads = std::max<int64_t>(1, c.kv_heads / n);
  const int64_t wire = n > c.kv_heads ? 4 : b;
  const int64_t out_or_delta = of == DeviceKind::cuda && dtype == DType::bf16 ? heads * c.head_dim * b : 4 * heads;
  return {
      (n - 1) * s * ((2 * heads + 2 * kv_heads) * c.head_dim * b + 4 * heads),
      (n - 1) * s *
          ((3 * heads + 2 * kv_heads) * c.head_dim * b + 4 * heads + out_or_delta + 2 * kv_heads * c.head_dim * wire)};
}

// want(kind of device): Bytes.
template <typename Want>
void expect_received(const AttentionCase& c, const RankSetup& setup, int rank, const RankRun& run, const Want& want) {
  const auto r = static_cast<size_t>(rank);
  SCOPED_TRACE(fmt::format("{} {} rank {}", describe(setup), name_of(setup.dtype), rank));
  EXPECT_EQ(run.forward[r].bytes_received, want(test_device_kind()).forward);
  EXPECT_EQ(run.backward[r].bytes_received, want(test_device_kind()).backward);
  for (DeviceKind of : kDevices) {
    Traffic dry_forward, dry_backward;
    plan_rank(c, setup, rank, &dry_forward, &dry_backward, of);
    EXPECT_EQ(dry_forward.bytes_received, want(of).forward) << "dry run of " << kind_name(of);
    EXPECT_EQ(dry_backward.bytes_received, want(of).backward) << "dry run of " << kind_name(of);
  }
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

// --- On the wire
// ------------------------------------------------------------------------------------------------------

TEST(ContextAttentionCost, OnlyKeysThatAreSeenTravel) {
  const AttentionCase c = two_rows(45);
  for (int cp : {1, 2, 3, 8})
    for (CpLayout layout : kLayouts)
      for (CpCommType comm_type : kTravelTypes) {
        const DType dtype = cp == 3 ? DType::bf16 : DType::f32;
        const RankSetup setup{.cp = cp, .comm_type = comm_type, .layout = layout, .dtype = dtype};
        const RankRun run = run_on_ranks(c, random_inputs(c, dtype), setup);
        for (int rank = 0; rank < cp; ++rank) {
          const Bytes travel = travel_bytes(seen(c, setup, rank), c.kv_heads, c.head_dim, dtype);
          expect_received(c, setup, rank, run, [&](DeviceKind) { return travel; });
        }
      }
}

// The plain ring hands every key to every rank: (cp - 1) s tokens each.
TEST(ContextAttentionCost, CausalZigzagMovesThreeQuartersOfTheRing) {
  for (int cp : {2, 3, 4, 8, 16})
    for (CpCommType comm_type : kTravelTypes) {
      const AttentionCase c = causal_row(40 * cp);
      const RankSetup setup{.cp = cp, .comm_type = comm_type, .dtype = DType::bf16};
      const int64_t token = 2 * c.kv_heads * c.head_dim;
      int64_t forward = 0, backward = 0;
      for (int rank = 0; rank < cp; ++rank) {
        Traffic f, b;
        plan_rank(c, setup, rank, &f, &b);
        EXPECT_EQ(f.bytes_received, token * 2 * (40 * (cp - 1) - 20 * rank)) << describe(setup) << " rank " << rank;
        forward += f.bytes_received;
        backward += b.bytes_received;
      }
      const int64_t ring = cp * (cp - 1) * 40 * token;
      EXPECT_EQ(4 * forward, 3 * ring * 2) << describe(setup);
      EXPECT_EQ(4 * backward, 3 * ring * (2 + 4)) << describe(setup);
    }
}

TEST(ContextAttentionCost, DocumentsThatStayOnOneRankMoveNothing) {
  const AttentionCase c{.seq_length = 40, .documents = {documents_of({5, 5, 5, 5, 5, 5, 5, 5})}};
  for (CpLayout layout : {CpLayout::contiguous, CpLayout::balanced})
    for (CpCommType comm_type : kTravelTypes) {
      const RankSetup setup{.cp = 4, .comm_type = comm_type, .layout = layout};
      const RankRun run = run_on_ranks(c, random_inputs(c), setup);
      for (size_t rank = 0; rank < 4; ++rank) {
        EXPECT_EQ(run.forward[rank].bytes_received, 0) << describe(setup);
        EXPECT_EQ(run.backward[rank].bytes_received, 0) << describe(setup);
        EXPECT_EQ(run.forward[rank].calls + run.backward[rank].calls, 0) << "nobody has anything: nobody calls";
      }
    }
}

TEST(ContextAttentionCost, ARankWithNothingToMoveJoinsEveryCall) {
  const AttentionCase c{.seq_length = 40, .documents = {documents_of({10, 30})}};
  for (CpCommType comm_type : kTravelTypes) {
    const RankSetup setup{.cp = 4, .comm_type = comm_type, .layout = CpLayout::contiguous};
    const RankRun run = run_on_ranks(c, random_inputs(c), setup);
    EXPECT_EQ(run.forward[0].bytes_received + run.forward[0].bytes_sent, 0) << describe(setup);
    EXPECT_GT(run.forward[3].bytes_received, 0) << describe(setup);
    EXPECT_EQ(run.forward[0].calls, run.forward[3].calls) << describe(setup);
  }
}

TEST(ContextAttentionCost, WindowsMoveTheirReachOnly) {
  AttentionCase c = causal_row(64);
  c.rule.window = 5;
  for (CpCommType comm_type : kTravelTypes) {
    Traffic forward;
    plan_rank(c, {.cp = 4, .comm_type = comm_type, .layout = CpLayout::contiguous}, 2, &forward);
    EXPECT_EQ(forward.bytes_received, 4 * 2 * c.kv_heads * c.head_dim * 4) << "four keys before the first query";
  }
}

// 1024 tokens of 2 key/value heads of size 64 in bf16, keys and values; expanded to the 8 query heads it would be 4
// times.
TEST(ContextAttentionCost, B028_KeyValueHeadsAreNotExpanded) {
  AttentionCase c{.seq_length = 4096, .heads = 8, .kv_heads = 2, .head_dim = 64, .documents = {{{0, 4096}}}};
  c.rule.causal = false;
  Traffic forward;
  plan_rank(c, {.cp = 4, .dtype = DType::bf16}, 0, &forward);
  EXPECT_EQ(forward.bytes_sent, 3 * 524288);
}

TEST(ContextAttentionCost, TradingHeadsMovesWhatTheFormulaSays) {
  AttentionCase c = two_rows(45);
  c.heads = 24;
  c.kv_heads = 4;
  for (const auto& [cp, dtype] : {std::pair{2, DType::f32}, {4, DType::bf16}, {8, DType::bf16}, {12, DType::f32}})
    for (CpLayout layout : kLayouts) {
      const RankSetup setup{.cp = cp, .comm_type = CpCommType::a2a, .layout = layout, .dtype = dtype};
      const RankRun run = run_on_ranks(c, random_inputs(c, dtype), setup);
      for (int rank = 0; rank < cp; ++rank)
        expect_received(c, setup, rank, run, [&](DeviceKind of) {
          return trade_bytes(c, setup.cp, local_tokens(c, setup), setup.dtype, of);
        });
    }
}

TEST(ContextAttentionCost, TwoLevelsMoveTheSumOfBoth) {
  AttentionCase c = two_rows(45);
  c.heads = 8;
  c.kv_heads = 2;
  for (int inner : {2, 4})
    for (CpLayout layout : kLayouts) {
      const RankSetup setup{
          .cp = 8, .comm_type = CpCommType::a2a_p2p, .layout = layout, .dtype = DType::bf16, .inner = inner};
      const RankRun run = run_on_ranks(c, random_inputs(c, DType::bf16), setup);
      for (int rank = 0; rank < 8; ++rank) {
        const Bytes travel =
            travel_bytes(seen(c, setup, rank / inner, inner), std::max(1, 2 / inner), c.head_dim, DType::bf16);
        expect_received(c, setup, rank, run, [&](DeviceKind of) {
          const Bytes trade = trade_bytes(c, inner, local_tokens(c, setup), DType::bf16, of);
          return Bytes{trade.forward + travel.forward, trade.backward + travel.backward};
        });
      }
    }
}

// --- In memory
// --------------------------------------------------------------------------------------------------------

// Local tokens in four pieces. Three pieces of keys and values in forward, and as many of gradients in backward: less
// than two whole buffers of each.
void expect_same_memory(DeviceKind of, int64_t tokens, DType dtype, CpLayout layout) {
  std::vector<int64_t> peaks;
  for (int cp : {2, 4, 8, 16}) {
    const AttentionCase c = causal_row(tokens * cp);
    const RankSetup setup{.cp = cp, .layout = layout, .dtype = dtype};
    SCOPED_TRACE(fmt::format("{} {} {}", kind_name(of), describe(setup), name_of(dtype)));
    const MemoryPlan plan = plan_rank(c, setup, cp - 1, nullptr, nullptr, of);
    const int64_t key_value = 2 * tokens * c.kv_heads * c.head_dim;
    EXPECT_EQ(bytes_of(plan, "forward", Purpose::communication), key_value * 3 / 4 * size_of(dtype));
    EXPECT_EQ(bytes_of(plan, "backward", Purpose::communication), key_value * 3 / 4 * (size_of(dtype) + 4));
    // One fp32 output (bf16 only), as large as the query; a GPU counts queries' intervals in the keys of a block.
    const int64_t output = dtype == DType::f32 ? 0 : tokens * c.heads * c.head_dim * 4;
    const int64_t intervals = of == DeviceKind::cuda ? 2 * tokens * size_of(DType::i64) : 0;
    EXPECT_EQ(bytes_of(plan, "forward", Purpose::workspace), output + intervals);
    peaks.push_back(plan.peak_bytes);
  }
  EXPECT_THAT(peaks, ::testing::Each(peaks[0]));
}

TEST(ContextAttentionCost, TravellingKeysTakeTheSameMemoryWhateverTheGroup) {
  for (DType dtype : {DType::f32, DType::bf16})
    for (CpLayout layout : kLayouts) {
      expect_same_memory(DeviceKind::cpu, 8 * kPiecesOnCpu.least_tokens, dtype, layout);
      expect_same_memory(DeviceKind::cuda, 4 * kPiecesOnGpu.least_tokens, dtype, layout);
    }
}

// Fewer tokens than a GPU's least piece travel whole: to the one other rank in a single step, else two ranks' at a
// time, in steps that overlap.
TEST(ContextAttentionCost, FewKeysTravelWholeOnAGpu) {
  for (int cp : {2, 4}) {
    const AttentionCase c = causal_row(2048 * cp);
    const MemoryPlan plan = plan_rank(c, {.cp = cp}, cp - 1, nullptr, nullptr, DeviceKind::cuda);
    const int64_t key_value = 2 * 2048 * c.kv_heads * c.head_dim * 4;
    EXPECT_EQ(bytes_of(plan, "forward", Purpose::communication), key_value * (cp == 2 ? 2 : 1 + 2 * 2)) << cp;
    EXPECT_EQ(bytes_of(plan, "backward", Purpose::communication), key_value * (cp == 2 ? 4 : 1 + 2 * 2 + 3 * 2)) << cp;
  }
}

TEST(ContextAttentionCost, TheGatherStaysWithinItsLimit) {
  AttentionCase c = causal_row(256);
  c.heads = 16;
  c.kv_heads = 8;
  const int64_t token = c.head_dim * 32;  // local tokens of one head
  for (int64_t limit : {int64_t{0}, 300 * token, 2000 * token}) {
    const RankSetup setup{
        .cp = 8, .comm_type = CpCommType::all_gather, .dtype = DType::bf16, .all_gather = {.buffer_size = limit}};
    const MemoryPlan plan = plan_rank(c, setup, 3);
    const int64_t allowed = limit > 0 ? limit : c.heads * token * (3 * 2 + 4);
    // One head at least: 7 ranks' keys and values, 3 buffers of bf16 and as many of fp32.
    const int64_t one_head = 7 * 2 * token * 3 * (2 + 4);
    EXPECT_LE(bytes_of(plan, "forward", Purpose::communication), std::max(allowed, one_head)) << limit;
    EXPECT_LE(bytes_of(plan, "backward", Purpose::communication), std::max(allowed, one_head)) << limit;
    EXPECT_GT(bytes_of(plan, "backward", Purpose::communication), 0);
  }
}

// Exchanges of a rank's forward pass on a GPU.
int64_t forward_calls(const AttentionCase& c, const RankSetup& setup, int rank) {
  Traffic forward;
  plan_rank(c, setup, rank, &forward, nullptr, DeviceKind::cuda);
  return forward.calls;
}

// Where documents end near the ranks' borders few keys travel, and all heads of them at once.
TEST(ContextAttentionCost, AGatherOfFewKeysIsOneStep) {
  AttentionCase whole = causal_row(256);
  whole.heads = 16;
  whole.kv_heads = 8;
  AttentionCase packed = whole;
  packed.documents = {documents_of({20, 20, 20, 20, 20, 20, 20, 20, 20, 20, 20, 20, 16})};
  // 7 ranks' keys and values of three heads, in 3 buffers of bf16.
  const int64_t three_heads = 3 * 7 * 2 * whole.head_dim * 32 * 3 * 2;
  const RankSetup setup{
      .cp = 8, .comm_type = CpCommType::all_gather, .dtype = DType::bf16, .all_gather = {.buffer_size = three_heads}};
  for (int rank = 0; rank < setup.cp; ++rank) {
    EXPECT_EQ(forward_calls(whole, setup, rank), 3) << rank;
    EXPECT_EQ(forward_calls(packed, setup, rank), 1) << rank;
  }
}

// Hops that bring few keys are one step, also of more than one peer; of those that bring all, two on a GPU.
TEST(ContextAttentionCost, HopsOfFewKeysTravelTogether) {
  const AttentionCase whole = causal_row(256);
  AttentionCase packed = whole;
  packed.documents = {documents_of({40, 40, 40, 40, 40, 40, 16})};
  const RankSetup setup{.cp = 8, .dtype = DType::bf16};
  for (int rank = 0; rank < setup.cp; ++rank) {
    EXPECT_EQ(forward_calls(whole, setup, rank), 4) << rank;
    EXPECT_EQ(forward_calls(packed, setup, rank), 1) << rank;
  }
}

// Memory is planned for rows that are one document. Packed ones bring fewer keys, so more heads at a time, or more keys
// to some of the queries, and must need no more of a GPU's scratch.
TEST(ContextAttentionCost, ScratchIsPlannedForEveryMask) {
  AttentionCase whole = causal_row(1024);
  whole.heads = 14;
  whole.kv_heads = 2;
  whole.head_dim = 64;
  for (const CpLayout layout : {CpLayout::contiguous, CpLayout::zigzag})
    for (const CpCommType comm_type : kTravelTypes)
      for (int rank = 0; rank < 4; ++rank) {
        const RankSetup setup{.cp = 4, .comm_type = comm_type, .layout = layout, .dtype = DType::bf16};
        const auto scratch = [&](std::vector<Span> documents) {
          AttentionCase c = whole;
          c.documents = {std::move(documents)};
          return plan_rank(c, setup, rank, nullptr, nullptr, DeviceKind::cuda).scratch_bytes;
        };
        const int64_t planned = scratch(documents_of({1024}));
        for (const int64_t first : {128, 256, 375, 512, 700, 900})
          EXPECT_EQ(scratch(documents_of({first, 1024 - first})), planned)
              << describe(setup) << " rank " << rank << " first document " << first;
      }
}

// Nor must hops that travel together, whose keys stand together in the row and are one block, with dropout or without.
TEST(ContextAttentionCost, ScratchIsPlannedForHopsThatTravelTogether) {
  AttentionCase c{.seq_length = 256, .heads = 4, .kv_heads = 2, .head_dim = 64, .documents = {}};
  for (const double probability : {0.0, 0.25})
    for (const CpCommType comm_type : kTravelTypes)
      for (int rank = 0; rank < 4; ++rank) {
        const RankSetup setup{.cp = 4,
                              .comm_type = comm_type,
                              .layout = CpLayout::contiguous,
                              .dtype = DType::bf16,
                              .dropout = {.probability = probability}};
        const auto scratch = [&](const std::vector<std::vector<Span>>& documents) {
          c.documents = documents;
          return plan_rank(c, setup, rank, nullptr, nullptr, DeviceKind::cuda).scratch_bytes;
        };
        const int64_t planned = scratch({documents_of({256}), documents_of({256})});
        EXPECT_EQ(scratch({documents_of({32, 224}), documents_of({64, 64, 64, 64})}), planned)
            << describe(setup) << " rank " << rank << " dropout " << probability;
      }
}

TEST(ContextAttentionCost, OneRankPacksAndSendsNothing) {
  for (CpCommType comm_type : kCommTypes)
    for (DType dtype : {DType::f32, DType::bf16}) {
      const MemoryPlan plan = plan_rank(two_rows(24), {.cp = 1, .comm_type = comm_type, .dtype = dtype}, 0);
      EXPECT_EQ(bytes_of(plan, "forward", Purpose::communication), 0);
      EXPECT_EQ(bytes_of(plan, "backward", Purpose::communication), 0);
    }
}

// Plans are made before data is seen: what is taken, and in which order, must not depend on the mask.
TEST(ContextAttentionCost, TakesDoNotDependOnTheMask) {
  for (CpCommType comm_type : kCommTypes)
    for (CpLayout layout : {CpLayout::zigzag, CpLayout::balanced}) {
      const RankSetup setup{.cp = 4, .comm_type = comm_type, .layout = layout, .dtype = DType::bf16};
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

// --- Refused
// ----------------------------------------------------------------------------------------------------------

TEST(ContextAttentionCost, B008_HeadsThatDoNotDivideAreRefusedWithTheDegreesThatWork) {
  const SequenceLayout layout(CpLayout::zigzag, 16, 2);
  const auto group = make_dry_communicator(Dimension::cp, 0, {0, 1});
  try {
    ContextAttention({.cp = group.get()}, layout, {.heads = 12, .kv_heads = 3, .head_dim = 8}, CpCommType::a2a);
    FAIL() << "12 and 3 heads over 2 ranks were accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("12 query heads and 3 key/value heads"));
    EXPECT_THAT(error.what(), HasSubstr("2 ranks"));
    EXPECT_THAT(error.what(), HasSubstr("1, 3, 6 or 12"));
  }
}

TEST(ContextAttentionCost, AutoIsResolvedBeforehand) {
  const SequenceLayout layout(CpLayout::zigzag, 16, 2);
  const auto group = make_dry_communicator(Dimension::cp, 0, {0, 1});
  EXPECT_THROW(
      ContextAttention({.cp = group.get()}, layout, {.heads = 4, .kv_heads = 2, .head_dim = 8}, CpCommType::automatic),
      InternalError);
}

// Blocks of one rank's attention as a device of kind `of` would run them.
struct Blocks : OpObserver {
  int64_t count = 0;
  double flops = 0;
  std::vector<OpCost> forward;
  void on_op(const OpCost& cost, OpTime) override {
    if (cost.op_class != OpClass::attention) return;
    if (cost.op == "attention_block_forward") forward.push_back(cost);
    ++count;
    flops += cost.flops;
  }

  Blocks(const AttentionCase& c, const RankSetup& setup, int rank, DeviceKind of) {
    const SequenceLayout layout(setup.layout, c.seq_length, setup.cp);
    const LocalAttention local(c, setup, layout, rank);
    const RankGroups groups(c, setup, rank, [&](const std::vector<int>& ranks) {
      const auto place = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
      return make_dry_communicator(Dimension::cp, static_cast<int>(place), ranks);
    });
    Device device(DryRun{of});
    Arena arena(device);
    device.observe(this);
    local.forward(device, arena, groups.view());
    local.backward(device, arena, groups.view());
    device.observe(nullptr);
  }
};

// On a GPU neighbouring blocks run as one, and no pair is lost by it. Of a causal zigzag: both own chunks with the own
// keys, and one block for each step: for two other ranks, of each of which one own chunk sees both chunks, or both own
// chunks see one; two blocks where it is this of the one and that of the other.
TEST(ContextAttentionCost, AGpuRunsNeighbouringBlocksAsOne) {
  const AttentionCase c = causal_row(4096);
  for (CpCommType comm_type : kTravelTypes)
    for (int rank = 0; rank < 8; ++rank) {
      const RankSetup setup{.cp = 8, .comm_type = comm_type, .dtype = DType::bf16};
      const Blocks joined(c, setup, rank, DeviceKind::cuda), separate(c, setup, rank, DeviceKind::cpu);
      EXPECT_EQ(joined.flops, separate.flops);
      if (comm_type == CpCommType::p2p) {
        const bool mixed = rank % 2 == 1 && rank < 7;
        EXPECT_EQ(joined.count, 2 * (1 + 4 + (mixed ? 1 : 0))) << rank;
      }
      EXPECT_LE(joined.count, separate.count);
    }
  // Two ranks, of which one sees all of the other's keys and that one half of its: as many pieces for either.
  const AttentionCase longer = causal_row(8 * kPiecesOnGpu.least_tokens);
  for (int rank = 0; rank < 2; ++rank)
    EXPECT_EQ(Blocks(longer, {.cp = 2, .dtype = DType::bf16}, rank, DeviceKind::cuda).count, 2 * (1 + 4));
  const AttentionCase rows = two_rows(1000);
  for (CpLayout layout : kLayouts)
    for (int rank = 0; rank < 4; ++rank) {
      const RankSetup setup{.cp = 4, .layout = layout, .dtype = DType::bf16};
      const Blocks joined(rows, setup, rank, DeviceKind::cuda), separate(rows, setup, rank, DeviceKind::cpu);
      EXPECT_EQ(joined.flops, separate.flops) << describe(setup);
      EXPECT_LE(joined.count, separate.count) << describe(setup);
    }
}

// Queries that see other ranks' keys wait for these where the others are enough to do meanwhile: two blocks, each of
// which writes its results once, rounded. Where they are not, the second block reads and writes the fp32 state.
TEST(ContextAttentionCost, OnAGpuQueriesWaitForOtherRanksKeysIfTheRestIsEnoughToDo) {
  AttentionCase c = causal_row(8192);
  const auto blocks = [&](std::vector<Span> documents, CpCommType comm_type) {
    c.documents = {std::move(documents)};
    return Blocks(c, {.cp = 2, .comm_type = comm_type, .dtype = DType::bf16}, 1, DeviceKind::cuda);
  };
  for (CpCommType comm_type : kTravelTypes) {
    // Chunks of 2048 tokens, of which rank 1 has the second and the third, 4096 in a row.
    const Blocks late = blocks(documents_of({2040, 16, 2000, 2000, 2136}), comm_type);
    std::vector<Span> short_ones = documents_of({8, 4000});
    while (short_ones.back().end < 8192)
      short_ones.push_back({short_ones.back().end, std::min<int64_t>(8192, short_ones.back().end + 64)});
    const Blocks met_twice = blocks(short_ones, comm_type);
    ASSERT_EQ(late.forward.size(), 2) << choice_name(comm_type);
    ASSERT_EQ(met_twice.forward.size(), 2) << choice_name(comm_type);
    for (size_t i = 0; i < 2; ++i) EXPECT_LT(late.forward[i].bytes, met_twice.forward[i].bytes);
  }
}

}  // namespace
}  // namespace farspan::test
