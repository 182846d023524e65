// SPDX-License-Identifier: Apache-2.0
// Bits against bits: what a query may not see changes nothing of it, neither do the number of threads and repetition.
#include <cstring>
#include <gtest/gtest.h>

#include "tests/ops/attention_case.h"

namespace farspan::test {
namespace {

class AttentionIsolation : public AttentionTest {};

INSTANTIATE_TEST_SUITE_P(EveryImplementation, AttentionIsolation, ::testing::ValuesIn(attention_variants()),
                         attention_variant_name);

bool sees(const Problem& p, int64_t i, int64_t j) {
  return p.mask[static_cast<size_t>(i)].lo <= j && j < p.mask[static_cast<size_t>(i)].hi;
}

// Rows of `width` values; row `token` of `found` and `clean` hold the same bits.
bool same_row(const TestVector<float>& found, const TestVector<float>& clean, int64_t token, int64_t width) {
  return std::memcmp(&found[token * width], &clean[token * width], static_cast<size_t>(width) * sizeof(float)) == 0;
}

bool row_is_nan(const TestVector<float>& values, int64_t token, int64_t width) {
  return std::all_of(&values[token * width], &values[token * width] + width, [](float x) { return std::isnan(x); });
}

void spoil_row(TestVector<float>& values, int64_t token, int64_t width, float with) {
  std::fill_n(&values[token * width], width, with);
}

// (heads, n) -> (n, heads), so that all of a query's values are one row.
TestVector<float> by_query(const TestVector<float>& per_head, int64_t heads) {
  const int64_t n = static_cast<int64_t>(per_head.size()) / heads;
  TestVector<float> result(per_head.size());
  for (int64_t a = 0; a < heads; ++a)
    for (int64_t i = 0; i < n; ++i) result[i * heads + a] = per_head[a * n + i];
  return result;
}

// Key and value `j` hold `with`: only queries that see it may notice, and (with NaN) they must.
void spoil_key(const AttentionImplementation& implementation, const Problem& p, const Results<float>& clean, int64_t j,
               float with) {
  const int64_t q_width = p.sizes.heads * p.sizes.head_size;
  const int64_t kv_width = p.sizes.kv_heads * p.sizes.head_size;
  Problem spoilt = p;
  spoil_row(spoilt.key, j, kv_width, with);
  spoil_row(spoilt.value, j, kv_width, with);
  Results<float> forward;
  run_forward(implementation, spoilt, {}, forward);
  Results<float> backward = clean;
  run_backward(implementation, spoilt, {}, backward);
  const TestVector<float> lse = by_query(forward.lse, p.sizes.heads), clean_lse = by_query(clean.lse, p.sizes.heads);
  for (int64_t i = 0; i < p.sizes.n; ++i) {
    if (sees(p, i, j)) {
      ASSERT_TRUE(!std::isnan(with) || row_is_nan(forward.out, i, q_width)) << "query " << i << " sees key " << j;
      ASSERT_TRUE(!std::isnan(with) || row_is_nan(backward.d_query, i, q_width)) << "query " << i;
      continue;
    }
    ASSERT_TRUE(same_row(forward.out, clean.out, i, q_width)) << "out of query " << i << ", key " << j;
    ASSERT_TRUE(same_row(lse, clean_lse, i, p.sizes.heads)) << "lse of query " << i << ", key " << j;
    ASSERT_TRUE(same_row(backward.d_query, clean.d_query, i, q_width)) << "d_query of query " << i << ", key " << j;
  }
  for (int64_t k = 0; k < p.sizes.m; ++k) {
    if (k == j) continue;
    ASSERT_TRUE(same_row(backward.d_key, clean.d_key, k, kv_width)) << "d_key of key " << k << ", key " << j;
    ASSERT_TRUE(same_row(backward.d_value, clean.d_value, k, kv_width)) << "d_value of key " << k << ", key " << j;
  }
}

// Query and output gradient `i`, its lse and delta hold `with`: only keys that it sees may notice.
void spoil_query(const AttentionImplementation& implementation, const Problem& p, const Results<float>& clean,
                 int64_t i, float with) {
  const int64_t q_width = p.sizes.heads * p.sizes.head_size;
  const int64_t kv_width = p.sizes.kv_heads * p.sizes.head_size;
  Problem spoilt = p;
  spoil_row(spoilt.query, i, q_width, with);
  spoil_row(spoilt.d_out, i, q_width, with);
  Results<float> forward;
  run_forward(implementation, spoilt, {}, forward);
  Results<float> backward = clean;
  for (int64_t a = 0; a < p.sizes.heads; ++a) backward.lse[a * p.sizes.n + i] = with;
  run_backward(implementation, spoilt, {}, backward);
  for (int64_t k = 0; k < p.sizes.n; ++k) {
    if (k == i) continue;
    ASSERT_TRUE(same_row(forward.out, clean.out, k, q_width)) << "out of query " << k << ", query " << i;
    ASSERT_TRUE(same_row(backward.d_query, clean.d_query, k, q_width)) << "d_query of query " << k << ", query " << i;
  }
  for (int64_t j = 0; j < p.sizes.m; ++j) {
    if (sees(p, i, j)) {
      ASSERT_TRUE(!std::isnan(with) || row_is_nan(backward.d_value, j, kv_width)) << "key " << j << ", query " << i;
      continue;
    }
    ASSERT_TRUE(same_row(backward.d_key, clean.d_key, j, kv_width)) << "d_key of key " << j << ", query " << i;
    ASSERT_TRUE(same_row(backward.d_value, clean.d_value, j, kv_width)) << "d_value of key " << j << ", query " << i;
  }
}

void spoil_everything_in_turn(const AttentionImplementation& implementation, const Problem& p, int64_t step) {
  const Results<float> clean = run(implementation, p);
  for (int64_t t = 0; t < std::min(p.sizes.n, p.sizes.m); t += step)
    for (float with : {kNaN, kInfinity}) {
      spoil_key(implementation, p, clean, t, with);
      spoil_query(implementation, p, clean, t, with);
      if (::testing::Test::HasFatalFailure()) return;
    }
}

TEST_P(AttentionIsolation, ForbiddenNaNsUnderACausalMask) {
  spoil_everything_in_turn(implementation(), random_problem({230, 230, 2, 1, 4}, causal(230, 230), dtype()), 23);
}

TEST_P(AttentionIsolation, ForbiddenNaNsInOtherDocuments) {
  const Problem p = random_problem({40, 40, 4, 2, 10}, documents({1, 2, 5, 11, 21}), dtype());
  spoil_everything_in_turn(implementation(), p, 1);
}

TEST_P(AttentionIsolation, ForbiddenNaNsOutsideAWindowAndInPadding) {
  spoil_everything_in_turn(implementation(), random_problem({120, 120, 1, 1, 4}, window(120, 9), dtype()), 11);
  spoil_everything_in_turn(implementation(), random_problem({30, 30, 1, 1, 4}, padded(30), dtype()), 3);
}

TEST_P(AttentionIsolation, ForbiddenNaNsBesideDropout) {
  Problem p = random_problem({90, 90, 4, 2, 4}, documents({1, 2, 5, 11, 71}), dtype());
  p.dropout = {.probability = 0.3, .key = 99};
  p.origin = 5;
  spoil_everything_in_turn(implementation(), p, 7);
}

TEST_P(AttentionIsolation, ForbiddenNaNsAmongIntervalsInNoOrder) {
  spoil_everything_in_turn(implementation(), random_problem({100, 130, 2, 2, 4}, scattered(100, 130), dtype()), 9);
}

TEST_P(AttentionIsolation, ForbiddenNaNsWithWideHeads) {
  spoil_everything_in_turn(implementation(), random_problem({140, 140, 2, 1, 136}, causal(140, 140), dtype()), 23);
  spoil_everything_in_turn(implementation(), random_problem({140, 140, 2, 1, 136}, window(140, 30), dtype()), 29);
}

// Queries that see nothing of a block keep their state to the bit, whatever it is.
TEST_P(AttentionIsolation, B026_StateOfQueriesThatSeeNothingStays) {
  const Problem p = random_problem({60, 60, 2, 1, 8}, padded(60), dtype());
  Tensors tensors(p);
  Device& device = test_device(1);
  TestVector<float> out(p.query.size()), lse(120);
  for (size_t i = 0; i < out.size(); ++i) out[i] = i % 3 == 0 ? -0.0f : static_cast<float>(i);
  for (size_t i = 0; i < lse.size(); ++i) lse[i] = static_cast<float>(i) - 30;
  const TestVector<float> out_before = out, lse_before = lse;
  attend_with(
      implementation(), device,
      AttentionForward{tensors.block({0, 60}), StateUse::add, f32_tensor(out, {60, 2, 8}), f32_tensor(lse, {2, 60})});
  device.synchronize();
  int64_t kept = 0;
  for (int64_t i = 0; i < 60; ++i) {
    if (p.mask[static_cast<size_t>(i)].lo < p.mask[static_cast<size_t>(i)].hi) {
      EXPECT_FALSE(same_row(out, out_before, i, 16));
      continue;
    }
    ++kept;
    EXPECT_TRUE(same_row(out, out_before, i, 16));
    EXPECT_TRUE(same_row(by_query(lse, 2), by_query(lse_before, 2), i, 2));
  }
  EXPECT_EQ(kept, 20);
}

bool same_bits(const TestVector<float>& a, const TestVector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void expect_same_bits(const Results<float>& a, const Results<float>& b) {
  EXPECT_TRUE(same_bits(a.out, b.out));
  EXPECT_TRUE(same_bits(a.lse, b.lse));
  EXPECT_TRUE(same_bits(a.d_query, b.d_query));
  EXPECT_TRUE(same_bits(a.d_key, b.d_key));
  EXPECT_TRUE(same_bits(a.d_value, b.d_value));
}

TEST_P(AttentionIsolation, B027_SameBitsForAnyThreadsAndEveryTime) {
  std::vector<Problem> problems = {
      random_problem({500, 500, 1, 1, 16}, causal(500, 500), dtype()),
      random_problem({300, 300, 6, 3, 8}, window(300, 100), dtype()),
      random_problem({200, 420, 2, 1, 8}, scattered(200, 420), dtype()),
      random_problem({200, 300, 2, 1, 136}, scattered(200, 300), dtype()),
  };
  problems.push_back(problems[1]);
  problems.back().dropout = {.probability = 0.2, .key = 7};
  for (const Problem& p : problems) {
    const Results<float> one = run(implementation(), p, {.threads = 1});
    for (int repeat = 0; repeat < 2; ++repeat)
      for (int threads : {1, 2, 3}) expect_same_bits(run(implementation(), p, {.threads = threads}), one);
  }
}

// What is kept from call to call for each thread is large enough for the widest head, whoever needed it first.
TEST_P(AttentionIsolation, WiderHeadsBeforeMoreThreads) {
  const Problem wide = random_problem({40, 40, 3, 1, 256}, causal(40, 40), dtype());
  const Problem narrow = random_problem({40, 40, 3, 1, 8}, causal(40, 40), dtype());
  const Results<float> one = run(implementation(), wide, {.threads = 1});
  run(implementation(), narrow, {.threads = 3});
  expect_same_bits(run(implementation(), wide, {.threads = 3}), one);
}

}  // namespace
}  // namespace farspan::test
