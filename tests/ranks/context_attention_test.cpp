// SPDX-License-Identifier: Apache-2.0
// Context-parallel attention on thread ranks against a dense fp64 oracle over whole rows: every schedule, layout, mask
// and group size, forward and backward.
//
// fp32 tolerance: 1e-5 of the tensor's largest value. A sum of up to 3000 fp32 terms is good to a few 1e-6 of it; a
// block attended twice, left out, or cut one token off moves it by 1e-3 and more.
#include "parallel/context/context_attention.h"

#include <cstdint>
#include <gmock/gmock.h>
#include <tuple>

#include "config/names.h"
#include "tests/ranks/attention_case.h"

namespace farspan::test {
namespace {

using ::testing::Values;

constexpr double kTolerance = 1e-5;

constexpr CpCommType kCommTypes[] = {CpCommType::p2p, CpCommType::all_gather, CpCommType::a2a, CpCommType::a2a_p2p};
constexpr CpLayout kLayouts[] = {CpLayout::zigzag, CpLayout::contiguous, CpLayout::balanced};

// Runs body(setup) for every communication type that this many ranks can use with the case's heads, and every layout.
template <typename Body>
void for_each_setup(const AttentionCase& c, int cp, Body&& body) {
  for (CpCommType comm_type : kCommTypes) {
    if (comm_type == CpCommType::a2a && refuse_a2a(c.heads, c.kv_heads, cp)) continue;
    for (CpLayout layout : kLayouts) {
      const RankSetup setup{.cp = cp, .comm_type = comm_type, .layout = layout};
      SCOPED_TRACE(describe(setup));
      body(setup);
    }
  }
}

void expect_equals_oracle(const AttentionCase& c, const RankSetup& setup) {
  const AttentionInputs inputs = random_inputs(c, setup.dtype);
  const RankRun run = run_on_ranks(c, inputs, setup);
  expect_close(run.values, dense_oracle(c, inputs), kTolerance);
  EXPECT_EQ(run.dirty_pads, 0);
}

// The uniform probe: out and lse from the visible positions alone, without the oracle's softmax.
void expect_probe(const AttentionCase& c, const RankSetup& setup) {
  const RankRun run = run_on_ranks(c, uniform_probe(c), setup);
  EXPECT_EQ(run.dirty_pads, 0);
  for (int64_t row = 0; row < c.rows(); ++row)
    for (int64_t q = 0; q < c.seq_length; ++q) {
      double sum = 0, count = 0;
      for (int64_t k = 0; k < c.seq_length; ++k)
        if (may_see(c, row, q, k)) sum += static_cast<double>(k), ++count;
      for (int64_t head = 0; head < c.heads; ++head) {
        const double out = run.values.out[at(row, q, head, 0, c.seq_length, c.heads, c.head_dim)];
        const double lse = run.values.lse[static_cast<size_t>((row * c.heads + head) * c.seq_length + q)];
        EXPECT_NEAR(out, count == 0 ? 0 : sum / count, 1e-5 * static_cast<double>(c.seq_length))
            << "row " << row << " token " << q << " head " << head;
        if (count == 0) {
          EXPECT_EQ(lse, -std::numeric_limits<double>::infinity()) << "token " << q;
        } else {
          EXPECT_NEAR(lse, std::log(count), 1e-5) << "row " << row << " token " << q << " head " << head;
        }
      }
    }
}

void expect_for_each_setup(const AttentionCase& c, int cp, void (*expect)(const AttentionCase&, const RankSetup&)) {
  for_each_setup(c, cp, [&](const RankSetup& setup) { expect(c, setup); });
}

AttentionCase one_document(int64_t seq_length, bool causal = true) {
  return {.seq_length = seq_length, .documents = {{{0, seq_length}}}, .rule = {.causal = causal}};
}

// --- Every group size, schedule, layout and mask
// -----------------------------------------------------------------------

// 45 tokens divide by no group's chunks but those of 3 and 5; two rows whose documents differ. Heads that cp divides;
// the key/value heads of 4, 5, 6 and 8 ranks are shared by several of them under a2a.
AttentionCase case_of_mask(const std::string& mask, int cp) {
  AttentionCase c{.seq_length = 45, .documents = {{{0, 45}}, {{0, 45}}}};
  c.heads = cp < 3 ? 4 : cp == 3 ? 6 : cp;
  c.kv_heads = cp == 5 ? 1 : c.heads / 2;
  if (mask == "full") c.rule.causal = false;
  if (mask == "window") c.rule.window = 7;
  if (mask == "prefix") c.rule.prefix = 6;
  if (mask == "documents") c.documents = {documents_of({1, 2, 5, 11, 26}), documents_of({19, 26})};
  if (mask == "padding") c.documents = {documents_of({30}), {{0, 7}, {8, 39}}};
  if (mask == "prefix") c.documents = {documents_of({20, 25}), documents_of({4, 41})};
  return c;
}

// "a2a+p2p" as a part of a test's name.
std::string identifier(std::string_view name) {
  std::string text(name);
  std::replace(text.begin(), text.end(), '+', '_');
  return text;
}

class EverySchedule : public ::testing::TestWithParam<std::tuple<int, CpCommType, CpLayout, std::string>> {};

TEST_P(EverySchedule, EqualsTheDenseOracle) {
  const auto [cp, comm_type, layout, mask] = GetParam();
  expect_equals_oracle(case_of_mask(mask, cp), {.cp = cp, .comm_type = comm_type, .layout = layout});
}

// The thread sanitizer, which looks for races and not for wrong numbers, takes an order of magnitude longer.
#if defined(__SANITIZE_THREAD__)
const auto kGroupSizes = Values(3, 8);
#else
const auto kGroupSizes = Values(1, 2, 3, 4, 5, 6, 8);
#endif

INSTANTIATE_TEST_SUITE_P(ContextAttention, EverySchedule,
                         ::testing::Combine(kGroupSizes, ::testing::ValuesIn(kCommTypes), ::testing::ValuesIn(kLayouts),
                                            Values("causal", "full", "window", "documents", "padding", "prefix")),
                         [](const auto& combination) {
                           return fmt::format("cp{}_{}_{}_{}", std::get<0>(combination.param),
                                              identifier(choice_name(std::get<1>(combination.param))),
                                              choice_name(std::get<2>(combination.param)),
                                              std::get<3>(combination.param));
                         });

TEST(ContextAttention, TwelveHeadsOverThreeOfSizeTen) {
  AttentionCase c = one_document(21);
  c.heads = 12;
  c.kv_heads = 3;
  c.head_dim = 10;
  for_each_setup(c, 4, [&](const RankSetup& setup) { expect_equals_oracle(c, setup); });
}

TEST(ContextAttention, WindowWithoutCausality) {
  AttentionCase c = one_document(33, false);
  c.rule.window = 5;
  for_each_setup(c, 3, [&](const RankSetup& setup) { expect_equals_oracle(c, setup); });
}

TEST(ContextAttention, B001_LengthsThatDoNotDivideAreExact) {
  expect_for_each_setup(one_document(10), 4, expect_equals_oracle);
  AttentionCase longer = one_document(2999);
  longer.heads = 2;
  longer.kv_heads = 1;
  longer.head_dim = 4;
  expect_equals_oracle(longer, {.cp = 8});
}

TEST(ContextAttention, B002_FewerTokensThanRanks) { expect_for_each_setup(one_document(2), 3, expect_equals_oracle); }

// --- How each type goes about it
// --------------------------------------------------------------------------------------

// What p2p fetches in a hop comes in pieces: 600 local tokens in three, of two rows with documents across their edges.
TEST(ContextAttention, KeysTravelInPieces) {
  AttentionCase c{.seq_length = 600,
                  .heads = 2,
                  .kv_heads = 1,
                  .head_dim = 4,
                  .documents = {documents_of({600}), documents_of({41, 300, 259})}};
  for (CpLayout layout : kLayouts) {
    expect_equals_oracle(c, {.cp = 2, .layout = layout});
    expect_equals_oracle(c, {.cp = 3, .layout = layout});
  }
}

// Rows of which most queries see keys of their own rank alone: on a GPU the others wait for what travels and see all
// their keys at once (late_queries.h). Also with padding, and under the types that trade heads first.
TEST(ContextAttention, MostQueriesSeeOneRankAlone) {
  AttentionCase c{
      .seq_length = 512,
      .heads = 4,
      .kv_heads = 1,
      .head_dim = 8,
      .documents = {documents_of({124, 8, 120, 8, 120, 8, 124}), documents_of({124, 8, 120, 8, 120, 8, 60})}};
  expect_for_each_setup(c, 2, expect_equals_oracle);
  c.rule.causal = false;
  expect_equals_oracle(c, {.cp = 2});
  expect_equals_oracle(c, {.cp = 4, .comm_type = CpCommType::all_gather, .layout = CpLayout::contiguous});
}

TEST(ContextAttention, TheGatherTakesSomeHeadsAtATime) {
  AttentionCase c{.seq_length = 45, .heads = 10, .kv_heads = 5, .documents = {{{0, 45}}, documents_of({19, 26})}};
  const int64_t head =
      2 * 2 * 12 * c.head_dim * 3 * (4 + 4);  // cp 4: three others' 2 rows of 12 tokens take 3 times it
  for (bool overlap : {true, false})
    for (int64_t buffer_size : {int64_t{1}, 3 * 2 * head + 1, 1000 * head})
      for (CpLayout layout : kLayouts)
        expect_equals_oracle(c, {.cp = 4,
                                 .comm_type = CpCommType::all_gather,
                                 .layout = layout,
                                 .all_gather = {.buffer_size = buffer_size, .overlap = overlap}});
}

TEST(ContextAttention, TwoLevelsOfAnySizes) {
  AttentionCase c = one_document(45);
  c.heads = 8;
  c.kv_heads = 2;
  for (int64_t inner : {1, 2, 4, 8})
    for (CpLayout layout : kLayouts)
      expect_equals_oracle(c, {.cp = 8, .comm_type = CpCommType::a2a_p2p, .layout = layout, .inner = inner});
}

TEST(ContextAttention, OneKeyValueHeadForAll) {
  AttentionCase c = one_document(21);
  c.kv_heads = 1;
  for (int cp : {2, 4}) for_each_setup(c, cp, [&](const RankSetup& setup) { expect_equals_oracle(c, setup); });
}

// Every pair's draw is keyed by row, head and positions, so that cutting changes nothing; fp32, hence kTolerance.
TEST(ContextAttention, DropoutIsTheSameHoweverTheRowIsCut) {
  AttentionCase c{.seq_length = 45, .documents = {{{0, 45}}, documents_of({19, 26})}};
  const AttentionInputs inputs = random_inputs(c);
  const AttentionDropout dropout{.probability = 0.25, .key = 77};
  const AttentionValues alone = run_on_ranks(c, inputs, {.dropout = dropout}).values;
  EXPECT_GT(errors_of(alone, dense_oracle(c, inputs)).out, 0.05) << "nothing was dropped";
  EXPECT_LE(errors_of(alone, dense_oracle(c, inputs)).lse, kTolerance) << "lse counts all pairs";
  for (int cp : {2, 3, 4})
    for_each_setup(c, cp, [&](RankSetup setup) {
      setup.dropout = dropout;
      expect_close(run_on_ranks(c, inputs, setup).values, alone, kTolerance);
    });
}

// --- Known failures
// ------------------------------------------------------------------------------------------------------

TEST(ContextAttention, B003_OddMultiplesOfTheGroup) {
  AttentionCase c = one_document(12);
  expect_for_each_setup(c, 4, expect_equals_oracle);
}

// dK and dV neither halved nor doubled where two ranks share a key/value head.
TEST(ContextAttention, B007_MoreRanksThanKeyValueHeads) {
  AttentionCase c = one_document(16);
  c.heads = 8;
  c.kv_heads = 2;
  for (DType dtype : {DType::f32, DType::bf16}) {
    const AttentionInputs inputs = random_inputs(c, dtype);
    const ValueErrors alone = errors_of(run_on_ranks(c, inputs, {.dtype = dtype}).values, dense_oracle(c, inputs));
    for (int cp : {4, 8}) {
      const RankSetup setup{.cp = cp, .comm_type = CpCommType::a2a, .dtype = dtype};
      const ValueErrors e = errors_of(run_on_ranks(c, inputs, setup).values, dense_oracle(c, inputs));
      EXPECT_LE(e.d_key, dtype == DType::f32 ? kTolerance : 1.5 * alone.d_key) << describe(setup);
      EXPECT_LE(e.d_value, dtype == DType::f32 ? kTolerance : 1.5 * alone.d_value) << describe(setup);
    }
  }
}

TEST(ContextAttention, B024_TwoLevelsKeepTheOrderOfTheRow) {
  const AttentionCase c = one_document(16);
  for (CpLayout layout : kLayouts) {
    const RankSetup setup{.cp = 4, .comm_type = CpCommType::a2a_p2p, .layout = layout, .inner = 2};
    expect_probe(c, setup);
    expect_equals_oracle(c, setup);
  }
}

TEST(ContextAttention, B004_ChunksOfOneToken) {
  expect_for_each_setup(one_document(4), 2, expect_probe);
  expect_for_each_setup(one_document(8), 4, expect_probe);
}

TEST(ContextAttention, B006_FullAttentionUnderZigzag) {
  expect_for_each_setup(one_document(8, false), 2, expect_probe);
}

// Six layers x' = (x + attention(x, x, x)) / 2, which keeps x from growing; the gradient of every layer's input against
// one rank's.
TEST(ContextAttention, B016_ErrorDoesNotGrowWithDepth) {
  AttentionCase c = one_document(32);
  c.kv_heads = c.heads;
  constexpr int kLayers = 6;
  auto gradients = [&](const RankSetup& setup) {
    const AttentionInputs first = random_inputs(c);
    std::vector<std::vector<float>> x = {first.query};
    auto inputs_of = [&](const std::vector<float>& hidden, const std::vector<float>& d_out) {
      return AttentionInputs{hidden, hidden, hidden, d_out};
    };
    for (int layer = 0; layer < kLayers; ++layer) {
      const AttentionValues y = run_on_ranks(c, inputs_of(x.back(), first.d_out), setup).values;
      std::vector<float> next = x.back();
      for (size_t i = 0; i < next.size(); ++i) next[i] = static_cast<float>(0.5 * (next[i] + y.out[i]));
      x.push_back(next);
    }
    std::vector<std::vector<double>> d_x;  // of layer 5's input, then 4's, ...
    std::vector<float> d_hidden = first.d_out;
    for (int layer = kLayers - 1; layer >= 0; --layer) {
      for (float& d : d_hidden) d *= 0.5f;
      const AttentionValues y = run_on_ranks(c, inputs_of(x[static_cast<size_t>(layer)], d_hidden), setup).values;
      for (size_t i = 0; i < d_hidden.size(); ++i)
        d_hidden[i] = static_cast<float>(d_hidden[i] + y.d_query[i] + y.d_key[i] + y.d_value[i]);
      d_x.emplace_back(d_hidden.begin(), d_hidden.end());
    }
    return d_x;
  };
  const auto reference = gradients({.cp = 1});
  for (CpCommType comm_type : kCommTypes) {
    const auto found = gradients({.cp = 2, .comm_type = comm_type});
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_LE(relative_error(found[i], reference[i]), kTolerance) << "layer " << kLayers - 1 - static_cast<int>(i);
  }
}

TEST(ContextAttention, B017_EveryRankAndRowIsCompared) {
  AttentionCase c{.seq_length = 32, .heads = 2, .kv_heads = 2, .documents = {{{0, 32}}, {{0, 32}}}};
  for_each_setup(c, 4, [&](const RankSetup& setup) {
    const AttentionInputs inputs = random_inputs(c);
    const AttentionValues got = run_on_ranks(c, inputs, setup).values;
    const AttentionValues want = dense_oracle(c, inputs);
    const RowLayout layout = row_layout(SequenceLayout(setup.layout, c.seq_length, setup.cp),
                                        IntervalMask(c.documents[0], c.rule));  // of either row
    for (int rank = 0; rank < setup.cp; ++rank)
      for (int64_t row = 0; row < c.rows(); ++row)
        for (const auto& [name, member] :
             {std::pair{"d_query", &AttentionValues::d_query}, std::pair{"d_key", &AttentionValues::d_key},
              std::pair{"d_value", &AttentionValues::d_value}}) {
          std::vector<double> got_share, want_share;
          for (const LocalSpan& span : layout.spans(rank)) {
            const size_t begin = at(row, span.positions.begin, 0, 0, c.seq_length, c.heads, c.head_dim);
            const size_t end = at(row, span.positions.end, 0, 0, c.seq_length, c.heads, c.head_dim);
            got_share.insert(got_share.end(), &(got.*member)[begin], &(got.*member)[end - 1] + 1);
            want_share.insert(want_share.end(), &(want.*member)[begin], &(want.*member)[end - 1] + 1);
          }
          EXPECT_LE(relative_error(got_share, want_share), kTolerance) << name << " of rank " << rank << " row " << row;
        }
  });
}

// The running state is fp32 and rounded once, so more ranks mean more merges but no more bf16 roundings. In fp32 every
// merge rounds once in the last place: 16 chunks in random walk are 4 half-ulps, hence the floor of 4 * 2^-24
// (bf16 errors are 10,000 times as large).
TEST(ContextAttention, B018_ErrorDoesNotGrowWithTheRing) {
  AttentionCase c{
      .seq_length = 64, .heads = 8, .kv_heads = 4, .head_dim = 16, .documents = {{{0, 64}}, documents_of({13, 51})}};
  for (DType dtype : {DType::f32, DType::bf16}) {
    const AttentionInputs inputs = random_inputs(c, dtype);
    const AttentionValues want = dense_oracle(c, inputs);
    constexpr double kFloor = 4 * 0x1p-24;
    // On a GPU cuDNN rounds the gradients that a block adds (ops/cudnn/attention_cudnn.h); against a lone rank's one
    // rounding that is seen, however many ranks there are.
    const double growth = dtype == DType::bf16 && testing_cuda() ? 2 : 1.5;
    for (CpCommType comm_type : kCommTypes) {
      ValueErrors alone;
      for (int cp : {1, 2, 4, 8}) {
        const RankSetup setup{.cp = cp, .comm_type = comm_type, .dtype = dtype};
        const ValueErrors e = errors_of(run_on_ranks(c, inputs, setup).values, want);
        if (cp == 1) alone = e;
        SCOPED_TRACE(fmt::format("{} {}: out {:.2e} lse {:.2e} d_query {:.2e} d_key {:.2e} d_value {:.2e}",
                                 farspan::name_of(dtype), describe(setup), e.out, e.lse, e.d_query, e.d_key,
                                 e.d_value));
        EXPECT_LE(e.largest(), dtype == DType::f32 ? kTolerance : 1e-2);  // bf16: half an ulp is 2e-3 of a value
        EXPECT_LE(e.out, 1.5 * alone.out + kFloor);
        EXPECT_LE(e.lse, 1.5 * alone.lse + kFloor);
        EXPECT_LE(e.d_query, growth * alone.d_query + kFloor);
        EXPECT_LE(e.d_key, growth * alone.d_key + kFloor);
        EXPECT_LE(e.d_value, growth * alone.d_value + kFloor);
      }
    }
  }
}

TEST(ContextAttention, B019_B031_PadTokensTakeNoWeight) {
  expect_for_each_setup(one_document(7, false), 2, expect_probe);  // every row 3.0; a leaking pad gives 2.625
  expect_for_each_setup(one_document(9, false), 2, expect_probe);  // every row 4.0
  expect_for_each_setup(one_document(9, false), 2, expect_equals_oracle);
}

TEST(ContextAttention, B020_TheLastTokenOfAnOddLengthCounts) {
  expect_for_each_setup({.seq_length = 8, .documents = {documents_of({3, 4})}}, 2, expect_probe);
  expect_for_each_setup({.seq_length = 8, .documents = {documents_of({7})}}, 2, expect_probe);
}

// The group's world ranks do not matter, only the ranks within it.
TEST(ContextAttention, B021_GroupsThatDoNotStartAtRankZero) {
  const AttentionCase c = one_document(19);
  const AttentionInputs inputs = random_inputs(c);
  for_each_setup(c, 2, [&](RankSetup setup) {
    const AttentionValues alone = run_on_ranks(c, inputs, setup).values;
    setup.groups = 2;
    const AttentionValues beside = run_on_ranks(c, inputs, setup).values;
    EXPECT_EQ(alone.out, beside.out);
    EXPECT_EQ(alone.d_query, beside.d_query);
    EXPECT_EQ(alone.d_key, beside.d_key);
    EXPECT_EQ(alone.d_value, beside.d_value);
  });
}

TEST(ContextAttention, B022_WindowsHoldAcrossRanks) {
  AttentionCase c = one_document(16);
  c.rule.window = 4;
  for_each_setup(c, 2, [&](const RankSetup& setup) { expect_probe(c, setup); });
}

TEST(ContextAttention, B023_TheScaleIsTheCallers) {
  AttentionCase c = one_document(16);
  c.scale = 0.5;
  for (int cp : {1, 2}) for_each_setup(c, cp, [&](const RankSetup& setup) { expect_equals_oracle(c, setup); });
}

TEST(ContextAttention, B025_LogSumExpIsPerHeadAndDocument) {
  AttentionCase c{.seq_length = 8, .heads = 2, .kv_heads = 2, .documents = {documents_of({3, 5})}};
  for_each_setup(c, 2, [&](const RankSetup& setup) { expect_probe(c, setup); });
}

TEST(ContextAttention, B029_OddRingsFinish) {
  expect_for_each_setup(one_document(12), 3, expect_probe);
  expect_for_each_setup(one_document(20), 5, expect_probe);
}

TEST(ContextAttention, B030_PackedZigzagAtEverySize) {
  for (int64_t seq_length : {8, 72, 520}) {
    SCOPED_TRACE(fmt::format("length {}", seq_length));
    const int64_t eighth = seq_length / 8;
    AttentionCase c{.seq_length = seq_length,
                    .documents = {documents_of({1, eighth, 2 * eighth, seq_length - 1 - 3 * eighth})}};
    for (CpCommType comm_type : kCommTypes) expect_equals_oracle(c, {.cp = 2, .comm_type = comm_type});
  }
}

TEST(ContextAttention, B032_RanksWithPaddingOnlyTakePart) {
  const AttentionCase c{.seq_length = 16, .documents = {documents_of({5})}};
  for_each_setup(c, 4, [&](const RankSetup& setup) {
    const AttentionInputs inputs = random_inputs(c);
    const RankRun run = run_on_ranks(c, inputs, setup);
    expect_close(run.values, dense_oracle(c, inputs), kTolerance);
    for (int64_t q = 5; q < 16; ++q) {
      const size_t i = at(0, q, 0, 0, c.seq_length, c.heads, c.head_dim);
      EXPECT_EQ(run.values.out[i], 0);
      EXPECT_EQ(run.values.d_query[i], 0);
      EXPECT_EQ(run.values.d_key[at(0, q, 0, 0, c.seq_length, c.kv_heads, c.head_dim)], 0);
    }
  });
}

TEST(ContextAttention, B033_PackedDocumentsWithGroupedHeads) {
  const AttentionCase c{.seq_length = 16, .documents = {documents_of({5, 3, 8})}};
  for_each_setup(c, 2, [&](const RankSetup& setup) { expect_equals_oracle(c, setup); });
}

TEST(ContextAttention, B034_B038_B039_B040_PackedDocumentsOfAnyLength) {
  const std::vector<AttentionCase> cases = {
      {.seq_length = 16, .documents = {documents_of({5, 11})}},
      {.seq_length = 24, .documents = {documents_of({5, 11, 1, 7})}},
      {.seq_length = 16, .documents = {documents_of({6, 7})}},  // padded by 3
      {.seq_length = 12, .documents = {{{0, 3}, {4, 10}}}},     // real lengths 3 and 6 in slots of 4 and 8
      {.seq_length = 19, .documents = {documents_of({1, 2, 5, 11})}},
  };
  for (const AttentionCase& c : cases)
    for (int cp : {2, 4})
      for_each_setup(c, cp, [&](const RankSetup& setup) {
        expect_probe(c, setup);
        expect_equals_oracle(c, setup);
      });
}

TEST(ContextAttention, B045_EveryRowHasItsOwnDocuments) {
  const AttentionCase c{.seq_length = 16, .documents = {documents_of({5, 11}), documents_of({12, 4})}};
  for_each_setup(c, 2, [&](const RankSetup& setup) {
    expect_probe(c, setup);
    expect_equals_oracle(c, setup);
  });
}

// --- Bits
// ----------------------------------------------------------------------------------------------------------------

// One token of document 0 becomes NaN in every input. What document 1 and earlier queries get must not move by a bit.
TEST(ContextAttention, AForbiddenTokenChangesNoBit) {
  const AttentionCase c{.seq_length = 26, .documents = {documents_of({11, 15})}};
  constexpr int64_t kSpoilt = 6;
  for_each_setup(c, 4, [&](const RankSetup& setup) {
    const AttentionInputs clean = random_inputs(c);
    AttentionInputs spoilt = clean;
    for (auto* x : {&spoilt.query, &spoilt.key, &spoilt.value, &spoilt.d_out}) {
      const auto token = std::ssize(*x) / c.seq_length;
      std::fill_n(x->begin() + kSpoilt * token, token, std::numeric_limits<float>::quiet_NaN());
    }
    const AttentionValues a = run_on_ranks(c, clean, setup).values;
    const AttentionValues b = run_on_ranks(c, spoilt, setup).values;
    for (int64_t q = 0; q < c.seq_length; ++q) {
      const bool other_document = q >= 11;
      for (int64_t i = 0; i < c.heads * c.head_dim; ++i) {
        const auto j = static_cast<size_t>(q * c.heads * c.head_dim + i);
        if (q == kSpoilt) {
          EXPECT_TRUE(std::isnan(b.out[j])) << "the spoilt token does see itself";
        }
        if (q < kSpoilt || other_document) {
          EXPECT_EQ(a.out[j], b.out[j]) << "out of token " << q;
          EXPECT_EQ(a.d_query[j], b.d_query[j]) << "d_query of token " << q;
        }
      }
      if (!other_document) continue;
      for (int64_t i = 0; i < c.kv_heads * c.head_dim; ++i) {
        const auto j = static_cast<size_t>(q * c.kv_heads * c.head_dim + i);
        EXPECT_EQ(a.d_key[j], b.d_key[j]) << "d_key of token " << q;
        EXPECT_EQ(a.d_value[j], b.d_value[j]) << "d_value of token " << q;
      }
    }
  });
}

TEST(ContextAttention, TheSameCallTwiceGivesTheSameBits) {
  const AttentionCase c = case_of_mask("documents", 5);
  for (DType dtype : {DType::f32, DType::bf16})
    for_each_setup(c, 5, [&](RankSetup setup) {
      setup.dtype = dtype;
      const AttentionInputs inputs = random_inputs(c, dtype);
      const AttentionValues a = run_on_ranks(c, inputs, setup).values;
      const AttentionValues b = run_on_ranks(c, inputs, setup).values;
      EXPECT_EQ(a.out, b.out);
      EXPECT_EQ(a.lse, b.lse);
      EXPECT_EQ(a.d_query, b.d_query);
      EXPECT_EQ(a.d_key, b.d_key);
      EXPECT_EQ(a.d_value, b.d_value);
    });
}

}  // namespace
}  // namespace farspan::test
