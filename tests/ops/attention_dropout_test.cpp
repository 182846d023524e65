// SPDX-License-Identifier: Apache-2.0
// Dropout in block attention: every implementation against the fp64 oracle, whose mask is the header's formula spelt
// out, over masks, positions and any cut of a row into blocks of keys, queries and heads.
#include <gtest/gtest.h>

#include "tests/ops/attention_case.h"

namespace farspan::test {
namespace {

// Tolerances are as without dropout, of a signal that dropout makes larger by at most 1 / (1 - p).
class AttentionWithDropout : public AttentionTest {
 protected:
  void expect_close(const Results<float>& found, const Results<double>& expected) const {
    EXPECT_LE(relative_error(found.out, expected.out), out_tolerance(dtype()));
    EXPECT_LE(relative_error(found.lse, expected.lse), kLseTolerance);
    EXPECT_LE(relative_error(found.d_query, expected.d_query), gradient_tolerance(dtype()));
    EXPECT_LE(relative_error(found.d_key, expected.d_key), gradient_tolerance(dtype()));
    EXPECT_LE(relative_error(found.d_value, expected.d_value), gradient_tolerance(dtype()));
  }
  void expect_matches_oracle(const Problem& p, const RunOptions& options = {}) const {
    SCOPED_TRACE(fmt::format("{}, keys from {}, p = {}", p.sizes.str(), p.origin, p.dropout.probability));
    expect_close(run(implementation(), p, options), oracle(p));
  }
  Problem problem(const Sizes& sizes, const Mask& mask, double probability) const {
    Problem p = random_problem(sizes, mask, dtype());
    p.dropout = {.probability = probability, .key = 0xfedcba9876543210, .row = 12345, .first_head = 3};
    return p;
  }
};

INSTANTIATE_TEST_SUITE_P(EveryImplementation, AttentionWithDropout, ::testing::ValuesIn(attention_variants()),
                         attention_variant_name);

TEST_P(AttentionWithDropout, MasksAndProbabilities) {
  for (const double probability : {0.1, 0.5, 0.9}) {
    expect_matches_oracle(problem({130, 130, 2, 1, 16}, causal(130, 130), probability));
    expect_matches_oracle(problem({70, 70, 4, 2, 10}, documents({1, 2, 5, 11, 51}), probability));
  }
  expect_matches_oracle(problem({37, 193, 2, 2, 8}, full(37, 193), 0.2));
  expect_matches_oracle(problem({110, 110, 6, 2, 8}, window(110, 30), 0.2));
  expect_matches_oracle(problem({60, 60, 1, 1, 8}, padded(60), 0.2));
  expect_matches_oracle(problem({140, 210, 4, 2, 12}, scattered(140, 210), 0.2));
}

// Blocks of draws begin at multiples of four positions, blocks of keys anywhere.
TEST_P(AttentionWithDropout, PositionsOfAnyOffset) {
  for (const int64_t origin : {1, 2, 3, 4, 101}) {
    Problem p = problem({40, 110, 2, 1, 8}, causal(40, 110), 0.3);
    p.origin = origin;
    p.query_begin = origin + 70;
    expect_matches_oracle(p);
  }
}

TEST_P(AttentionWithDropout, B106_PositionsBeyond32Bits) {
  Problem p = problem({20, 40, 2, 1, 8}, causal(20, 40), 0.3);
  p.origin = (int64_t{5} << 34) + 1;
  p.query_begin = p.origin + 20;
  expect_matches_oracle(p);
}

TEST_P(AttentionWithDropout, KeysInBlocksOfAnyOrder) {
  const Problem p = problem({130, 300, 4, 2, 16}, scattered(130, 300), 0.25);
  expect_matches_oracle(p, {.blocks = {{120, 300}, {0, 1}, {1, 3}, {3, 120}}});
  expect_matches_oracle(p, {.blocks = equal_blocks(300, 7)});
}

// Queries [begin, end) of heads [first, last) as a problem of their own, at the same positions.
Problem part_of(const Problem& p, int64_t begin, int64_t end, int64_t first, int64_t last) {
  const int64_t group = p.sizes.heads / p.sizes.kv_heads, D = p.sizes.head_size;
  Problem part = p;
  part.sizes.n = end - begin;
  part.sizes.heads = last - first;
  part.sizes.kv_heads = (last - first) / group;
  part.mask = Mask(p.mask.begin() + begin, p.mask.begin() + end);
  part.query_begin = p.query_begin + begin;
  part.dropout.first_head = p.dropout.first_head + first;
  const auto cut = [&](const TestVector<float>& values, int64_t heads, int64_t row_begin, int64_t row_end, int64_t from,
                       int64_t to) {
    TestVector<float> piece;
    for (int64_t i = row_begin; i < row_end; ++i)
      piece.insert(piece.end(), values.begin() + (i * heads + from) * D, values.begin() + (i * heads + to) * D);
    return piece;
  };
  part.query = cut(p.query, p.sizes.heads, begin, end, first, last);
  part.d_out = cut(p.d_out, p.sizes.heads, begin, end, first, last);
  part.key = cut(p.key, p.sizes.kv_heads, 0, p.sizes.m, first / group, last / group);
  part.value = cut(p.value, p.sizes.kv_heads, 0, p.sizes.m, first / group, last / group);
  return part;
}

// Whoever computes a pair draws the same: queries and heads dealt to ranks give the outputs of one rank, to the bit
// where a row of the kernel is the same work.
TEST_P(AttentionWithDropout, B078_QueriesAndHeadsDealtToRanks) {
  const int64_t n = 90, heads = 4, D = 8;
  const Problem p = problem({n, n, heads, 2, D}, causal(n, n), 0.4);
  const Results<float> whole = run(implementation(), p);
  expect_close(whole, oracle(p));
  TestVector<double> d_key(p.key.size(), 0.0);
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 17}, {17, 60}, {60, 90}})
    for (const int64_t first : {0, 2}) {
      const Problem part = part_of(p, begin, end, first, first + 2);
      const Results<float> r = run(implementation(), part);
      expect_close(r, oracle(part));
      TestVector<double> expected;
      for (int64_t i = begin; i < end; ++i)
        expected.insert(expected.end(), whole.out.begin() + (i * heads + first) * D,
                        whole.out.begin() + (i * heads + first + 2) * D);
      EXPECT_LE(relative_error(r.out, expected), std::max(2e-7, out_tolerance(dtype()) / 5))
          << "queries " << begin << " on, heads " << first << " on";
      for (int64_t j = 0; j < n; ++j)
        for (int64_t d = 0; d < D; ++d) d_key[(j * 2 + first / 2) * D + d] += r.d_key[j * D + d];
    }
  EXPECT_LE(relative_error(whole.d_key, d_key), gradient_tolerance(dtype()));
}

// Another row, head, query, key or dropout key is another draw: the masks of any two differ in about half the pairs.
TEST_P(AttentionWithDropout, MasksDiffer) {
  const Problem p = problem({64, 64, 1, 1, 64}, full(64, 64), 0.5);
  // Values that are unit vectors show each weight: out_i holds the row i of m p.
  const auto mask_of = [&](Problem probe) {
    std::fill(probe.query.begin(), probe.query.end(), 0.0f);
    for (int64_t i = 0; i < 64 * 64; ++i) probe.value[i] = i / 64 == i % 64 ? 1.0f : 0.0f;
    Results<float> r;
    run_forward(implementation(), probe, {}, r);
    for (float& x : r.out) {
      EXPECT_TRUE(x == 0 || std::abs(x * 32 - 1) < 1e-6) << x;
      x = x != 0;
    }
    return r.out;
  };
  std::vector<TestVector<float>> masks{mask_of(p)};
  for (int change = 0; change < 5; ++change) {
    Problem other = p;
    if (change == 0) other.dropout.key += 1;
    if (change == 1) other.dropout.row += 1;
    if (change == 2) other.dropout.first_head += 1;
    if (change == 3) other.query_begin += 64;
    if (change == 4) other.origin += 64;
    masks.push_back(mask_of(other));
  }
  for (size_t a = 0; a < masks.size(); ++a)
    for (size_t b = 0; b < a; ++b) {
      int64_t different = 0;
      for (size_t i = 0; i < masks[a].size(); ++i) different += masks[a][i] != masks[b][i];
      EXPECT_NEAR(static_cast<double>(different) / 4096, 0.5, 4 * 0.5 / 64) << a << " and " << b;
    }
}

TEST_P(AttentionWithDropout, ProbabilityZeroIsNone) {
  Problem p = problem({50, 50, 2, 1, 8}, causal(50, 50), 0);
  const Results<float> zero = run(implementation(), p);
  p.dropout = {};
  const Results<float> none = run(implementation(), p);
  EXPECT_EQ(zero.out, none.out);
  EXPECT_EQ(zero.d_value, none.d_value);
  EXPECT_EQ(zero.d_query, none.d_query);
}

}  // namespace
}  // namespace farspan::test
