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

#include "tests/ranks/attention_case.h"

namespace farspan::test {
namespace {

using ::testing::Values;

constexpr double kTolerance = 1e-5;

constexpr CpCommType kCommTypes[] = {CpCommType::p2p, CpCommType::all_gather};
constexpr CpLayout kLayouts[] = {CpLayout::zigzag, CpLayout::contiguous};

std::string name_of(CpCommType type) { return type == CpCommType::p2p ? "p2p" : "all_gather"; }
std::string name_of(CpLayout layout) { return layout == CpLayout::zigzag ? "zigzag" : "contiguous"; }

std::string describe(const RankSetup& setup) {
  return fmt::format("cp {} {} {}", setup.cp, name_of(setup.comm_type), name_of(setup.layout));
}

// Runs body(setup) for every schedule and layout of one group size.
template <typename Body>
void for_each_setup(int cp, Body&& body) {
  for (CpCommType comm_type : kCommTypes)
    for (CpLayout layout : kLayouts) {
      const RankSetup setup{.cp = cp, .comm_type = comm_type, .layout = layout};
      SCOPED_TRACE(describe(setup));
      body(setup);
    }
}

void expect_equals_oracle(const AttentionCase& c, const RankSetup& setup, double tolerance = kTolerance) {
  const AttentionInputs inputs = random_inputs(c, setup.dtype);
  const RankRun run = run_on_ranks(c, inputs, setup);
  expect_close(run.values, dense_oracle(c, inputs), tolerance);
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

AttentionCase one_document(int64_t seq_length, bool causal = true) {
  return {.seq_length = seq_length, .documents = {{{0, seq_length}}}, .rule = {.causal = causal}};
}

// --- Every group size, schedule, layout and mask
// -----------------------------------------------------------------------

// 45 tokens divide by no group's chunks but those of 3 and 5; two rows whose documents differ.
AttentionCase case_of_mask(const std::string& mask) {
  AttentionCase c{.seq_length = 45, .documents = {{{0, 45}}, {{0, 45}}}};
  if (mask == "full") c.rule.causal = false;
  if (mask == "window") c.rule.window = 7;
  if (mask == "prefix") c.rule.prefix = 6;
  if (mask == "documents") c.documents = {documents_of({1, 2, 5, 11, 26}), documents_of({19, 26})};
  if (mask == "padding") c.documents = {documents_of({30}), {{0, 7}, {8, 39}}};
  if (mask == "prefix") c.documents = {documents_of({20, 25}), documents_of({4, 41})};
  return c;
}

class EverySchedule : public ::testing::TestWithParam<std::tuple<int, CpCommType, CpLayout, std::string>> {};

TEST_P(EverySchedule, EqualsTheDenseOracle) {
  const auto [cp, comm_type, layout, mask] = GetParam();
  expect_equals_oracle(case_of_mask(mask), {.cp = cp, .comm_type = comm_type, .layout = layout});
}

INSTANTIATE_TEST_SUITE_P(ContextAttention, EverySchedule,
                         ::testing::Combine(Values(1, 2, 3, 4, 5, 8), ::testing::ValuesIn(kCommTypes),
                                            ::testing::ValuesIn(kLayouts),
                                            Values("causal", "full", "window", "documents", "padding", "prefix")),
                         [](const auto& combination) {
                           return fmt::format("cp{}_{}_{}_{}", std::get<0>(combination.param),
                                              name_of(std::get<1>(combination.param)),
                                              name_of(std::get<2>(combination.param)), std::get<3>(combination.param));
                         });

TEST(ContextAttention, TwelveHeadsOverThreeOfSizeTen) {
  AttentionCase c = one_document(21);
  c.heads = 12;
  c.kv_heads = 3;
  c.head_dim = 10;
  for_each_setup(4, [&](const RankSetup& setup) { expect_equals_oracle(c, setup); });
}

TEST(ContextAttention, WindowWithoutCausality) {
  AttentionCase c = one_document(33, false);
  c.rule.window = 5;
  for_each_setup(3, [&](const RankSetup& setup) { expect_equals_oracle(c, setup); });
}

TEST(ContextAttention, B001_LengthsThatDoNotDivideAreExact) {
  for_each_setup(4, [&](const RankSetup& setup) { expect_equals_oracle(one_document(10), setup); });
  AttentionCase longer = one_document(2999);
  longer.heads = 2;
  longer.kv_heads = 1;
  longer.head_dim = 4;
  expect_equals_oracle(longer, {.cp = 8});
}

TEST(ContextAttention, B002_FewerTokensThanRanks) {
  for_each_setup(3, [&](const RankSetup& setup) { expect_equals_oracle(one_document(2), setup); });
}

// --- Known failures
// ------------------------------------------------------------------------------------------------------

TEST(ContextAttention, B004_ChunksOfOneToken) {
  for_each_setup(2, [&](const RankSetup& setup) { expect_probe(one_document(4), setup); });
  for_each_setup(4, [&](const RankSetup& setup) { expect_probe(one_document(8), setup); });
}

TEST(ContextAttention, B006_FullAttentionUnderZigzag) {
  for_each_setup(2, [&](const RankSetup& setup) { expect_probe(one_document(8, false), setup); });
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
  for_each_setup(4, [&](const RankSetup& setup) {
    const AttentionInputs inputs = random_inputs(c);
    const AttentionValues got = run_on_ranks(c, inputs, setup).values;
    const AttentionValues want = dense_oracle(c, inputs);
    const SequenceLayout layout(setup.layout, c.seq_length, setup.cp);
    for (int rank = 0; rank < setup.cp; ++rank)
      for (int64_t row = 0; row < c.rows(); ++row)
        for (const auto& [name, member] :
             {std::pair{"d_query", &AttentionValues::d_query}, std::pair{"d_key", &AttentionValues::d_key},
              std::pair{"d_value", &AttentionValues::d_value}}) {
          std::vector<double> got_share, want_share;
          for (Span span : layout.spans(rank)) {
            const size_t begin = at(row, span.begin, 0, 0, c.seq_length, c.heads, c.head_dim);
            const size_t end = at(row, span.end, 0, 0, c.seq_length, c.heads, c.head_dim);
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
  AttentionCase c{.seq_length = 64, .head_dim = 16, .documents = {{{0, 64}}, documents_of({13, 51})}};
  for (DType dtype : {DType::f32, DType::bf16}) {
    const AttentionInputs inputs = random_inputs(c, dtype);
    const AttentionValues want = dense_oracle(c, inputs);
    constexpr double kFloor = 4 * 0x1p-24;
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
        EXPECT_LE(e.d_query, 1.5 * alone.d_query + kFloor);
        EXPECT_LE(e.d_key, 1.5 * alone.d_key + kFloor);
        EXPECT_LE(e.d_value, 1.5 * alone.d_value + kFloor);
      }
    }
  }
}

TEST(ContextAttention, B019_B031_PadTokensTakeNoWeight) {
  for_each_setup(2, [&](const RankSetup& setup) {
    expect_probe(one_document(7, false), setup);  // every row 3.0; a leaking pad gives 2.625
    expect_probe(one_document(9, false), setup);  // every row 4.0
    expect_equals_oracle(one_document(9, false), setup);
  });
}

TEST(ContextAttention, B020_TheLastTokenOfAnOddLengthCounts) {
  for_each_setup(2, [&](const RankSetup& setup) {
    expect_probe({.seq_length = 8, .documents = {documents_of({3, 4})}}, setup);
    expect_probe({.seq_length = 8, .documents = {documents_of({7})}}, setup);
  });
}

// The group's world ranks do not matter, only the ranks within it.
TEST(ContextAttention, B021_GroupsThatDoNotStartAtRankZero) {
  const AttentionCase c = one_document(19);
  const AttentionInputs inputs = random_inputs(c);
  for_each_setup(2, [&](RankSetup setup) {
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
  for_each_setup(2, [&](const RankSetup& setup) { expect_probe(c, setup); });
}

TEST(ContextAttention, B023_TheScaleIsTheCallers) {
  AttentionCase c = one_document(16);
  c.scale = 0.5;
  for (int cp : {1, 2}) for_each_setup(cp, [&](const RankSetup& setup) { expect_equals_oracle(c, setup); });
}

TEST(ContextAttention, B025_LogSumExpIsPerHeadAndDocument) {
  AttentionCase c{.seq_length = 8, .heads = 2, .kv_heads = 2, .documents = {documents_of({3, 5})}};
  for_each_setup(2, [&](const RankSetup& setup) { expect_probe(c, setup); });
}

TEST(ContextAttention, B029_OddRingsFinish) {
  for_each_setup(3, [&](const RankSetup& setup) { expect_probe(one_document(12), setup); });
  for_each_setup(5, [&](const RankSetup& setup) { expect_probe(one_document(20), setup); });
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
  for_each_setup(4, [&](const RankSetup& setup) {
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
  for_each_setup(2, [&](const RankSetup& setup) { expect_equals_oracle(c, setup); });
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
      for_each_setup(cp, [&](const RankSetup& setup) {
        expect_probe(c, setup);
        expect_equals_oracle(c, setup);
      });
}

TEST(ContextAttention, B045_EveryRowHasItsOwnDocuments) {
  const AttentionCase c{.seq_length = 16, .documents = {documents_of({5, 11}), documents_of({12, 4})}};
  for_each_setup(2, [&](const RankSetup& setup) {
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
  for_each_setup(4, [&](const RankSetup& setup) {
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
  const AttentionCase c = case_of_mask("documents");
  for (DType dtype : {DType::f32, DType::bf16})
    for_each_setup(5, [&](RankSetup setup) {
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
