// SPDX-License-Identifier: Apache-2.0
// Block attention against a dense fp64 oracle: every implementation, f32 and bf16, over masks, sizes, heads and views.
#include <gtest/gtest.h>

#include "tests/ops/attention_case.h"

namespace farspan::test {
namespace {

class Attention : public AttentionTest {
 protected:
  // Skips what the implementation declines; the last of the list declines nothing.
  bool declined(const Problem& p) const {
    Tensors tensors(p);
    Device& device = test_device(1);
    return !implementation().forward_declines(device, {.block = tensors.block({0, p.sizes.m})}).empty();
  }

  void expect_matches_oracle(const Problem& p, const RunOptions& options = {}) const {
    SCOPED_TRACE(p.sizes.str());
    if (declined(p)) return;
    const Results<double> expected = oracle(p);
    const Results<float> found = run(implementation(), p, options);
    EXPECT_LE(relative_error(found.out, expected.out), out_tolerance(dtype()));
    EXPECT_LE(relative_error(found.lse, expected.lse), kLseTolerance);
    EXPECT_LE(relative_error(found.d_query, expected.d_query), gradient_tolerance(dtype()));
    EXPECT_LE(relative_error(found.d_key, expected.d_key), gradient_tolerance(dtype()));
    EXPECT_LE(relative_error(found.d_value, expected.d_value), gradient_tolerance(dtype()));
  }
};

INSTANTIATE_TEST_SUITE_P(EveryImplementation, Attention, ::testing::ValuesIn(attention_variants()),
                         attention_variant_name);

TEST_P(Attention, CausalOfManyLengths) {
  for (int64_t n : {1, 3, 17, 65, 130, 257})
    expect_matches_oracle(random_problem({n, n, 2, 1, 16}, causal(n, n), dtype()));
}

TEST_P(Attention, FullOfManyLengths) {
  for (int64_t n : {1, 3, 17, 65, 130})
    for (int64_t m : {1, 5, 64, 193}) expect_matches_oracle(random_problem({n, m, 2, 2, 8}, full(n, m), dtype()));
}

TEST_P(Attention, CausalWithOtherNumbersOfQueriesAndKeys) {
  expect_matches_oracle(random_problem({40, 130, 2, 2, 8}, causal(40, 130), dtype()));
  expect_matches_oracle(random_problem({130, 40, 2, 2, 8}, causal(130, 40), dtype()));
}

TEST_P(Attention, Window) {
  for (int64_t size : {1, 4, 50})
    expect_matches_oracle(random_problem({150, 150, 2, 1, 8}, window(150, size), dtype()));
}

TEST_P(Attention, Documents) {
  const Mask mask = documents({1, 2, 5, 11, 1, 1, 70, 2, 30});
  const int64_t n = static_cast<int64_t>(mask.size());
  expect_matches_oracle(random_problem({n, n, 4, 2, 8}, mask, dtype()));
}

TEST_P(Attention, Prefix) { expect_matches_oracle(random_problem({120, 120, 2, 2, 8}, prefix(120, 37), dtype())); }

TEST_P(Attention, Padding) { expect_matches_oracle(random_problem({120, 120, 2, 2, 8}, padded(120), dtype())); }

TEST_P(Attention, IntervalsInNoOrder) {
  expect_matches_oracle(random_problem({140, 210, 4, 2, 12}, scattered(140, 210), dtype()));
}

TEST_P(Attention, HeadSizes) {
  for (int64_t head_size : {1, 2, 7, 8, 10, 64, 80, 128, 200, 256})
    expect_matches_oracle(random_problem({70, 70, 2, 1, head_size}, causal(70, 70), dtype()));
}

TEST_P(Attention, HeadSizeAboveTheOptimisedRange) {
  expect_matches_oracle(random_problem({20, 20, 1, 1, 264}, causal(20, 20), dtype()));
}

TEST_P(Attention, GroupedQueries) {
  expect_matches_oracle(random_problem({50, 50, 12, 3, 16}, causal(50, 50), dtype()));
  expect_matches_oracle(random_problem({50, 50, 5, 1, 16}, window(50, 20), dtype()));
}

TEST_P(Attention, KeysInBlocksOfAnyOrder) {
  const Problem p = random_problem({130, 300, 4, 2, 16}, scattered(130, 300), dtype());
  expect_matches_oracle(p, {.blocks = {{120, 300}, {0, 1}, {1, 120}}});
}

TEST_P(Attention, B014_HeadSizeTenIsScaledByItsTrueSize) {
  Problem p = random_problem({8, 8, 2, 1, 10}, causal(8, 8), dtype());
  p.scale = static_cast<float>(1 / std::sqrt(10.0));
  expect_matches_oracle(p);
}

TEST_P(Attention, B023_TheScaleGivenIsUsed) {
  Problem p = random_problem({30, 30, 2, 2, 8}, causal(30, 30), dtype());
  p.scale = 0.5f;
  expect_matches_oracle(p);
  p.scale = -1.5f;
  expect_matches_oracle(p);
}

TEST_P(Attention, B033_DocumentsShorterThanATileWithGroupedHeads) {
  const Problem p = random_problem({16, 16, 4, 2, 8}, documents({5, 3, 8}), dtype());
  expect_matches_oracle(p);
  EXPECT_EQ(visible_pairs(p.mask, 16), 15 + 6 + 36);
}

TEST_P(Attention, B026_QueriesThatSeeNothing) {
  Problem p = random_problem({3, 1, 1, 1, 4}, causal(3, 1), dtype());
  const Results<float> r = run(implementation(), p);
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(r.out[i], 0);
    EXPECT_EQ(r.d_query[i], 0);
  }
  EXPECT_EQ(r.lse[0], -kInfinity);
  EXPECT_EQ(r.lse[1], -kInfinity);
  expect_matches_oracle(p);
}

// out (1, 1, 2) and lse after attending to one key with score `score` and value `value`.
std::pair<float, float> attend_once(const AttentionImplementation& implementation, DType dtype, float out, float lse,
                                    float score, float value, bool sees) {
  Problem p{{1, 1, 1, 1, 2}, dtype, 1.0f, {{0, sees ? 1 : 0}}, {1, 0}, {score, 0}, {value, value}, {0, 0}};
  Tensors tensors(p);
  Device& device = test_device(1);
  TestVector<float> o{out, out}, l{lse};
  attend_with(implementation, device,
              AttentionForward{tensors.block({0, 1}), StateUse::add, f32_tensor(o, {1, 1, 2}), f32_tensor(l, {1, 1})});
  device.synchronize();
  EXPECT_EQ(o[0], o[1]);
  return {o[0], l[0]};
}

TEST_P(Attention, B026_EmptyPartialsMerge) {
  using State = std::pair<float, float>;
  EXPECT_EQ(attend_once(implementation(), dtype(), 0, -kInfinity, 1.5f, 7, true), State(7, 1.5f));
  EXPECT_EQ(attend_once(implementation(), dtype(), 7, 1.5f, 3, kNaN, false), State(7, 1.5f));
  EXPECT_EQ(attend_once(implementation(), dtype(), 0, -kInfinity, 3, kNaN, false), State(0, -kInfinity));
  // A visible key of weight zero changes nothing either.
  EXPECT_EQ(attend_once(implementation(), dtype(), 0, -kInfinity, -kInfinity, 7, true), State(0, -kInfinity));
  EXPECT_EQ(attend_once(implementation(), dtype(), 7, 1.5f, -kInfinity, 9, true), State(7, 1.5f));
}

// Scores far apart: no overflow, and a later block may hold the largest score.
TEST_P(Attention, LargeScores) {
  Problem p = random_problem({60, 200, 1, 1, 8}, causal(60, 200), dtype());
  p.scale = 16;
  const Results<double> expected = oracle(p);
  for (int64_t blocks : {1, 4}) {
    const Results<float> found = run(implementation(), p, {.blocks = equal_blocks(200, blocks)});
    // A score of 200 carries an error of about 200 * 6e-8, which exp turns into a relative one.
    EXPECT_LE(relative_error(found.out, expected.out), std::max(5e-5, out_tolerance(dtype())));
    EXPECT_LE(relative_error(found.lse, expected.lse), kLseTolerance);
    EXPECT_LE(relative_error(found.d_query, expected.d_query), std::max(5e-5, gradient_tolerance(dtype())));
  }
}

// q, k and v are slices of one fused projection (n, heads + 2 kv_heads, D); out and the gradients are strided too.
TEST_P(Attention, StridedViews) {
  const Sizes s{37, 37, 4, 2, 24};
  const Problem p = random_problem(s, causal(37, 37), dtype());
  if (declined(p)) return;
  const int64_t all = s.heads + 2 * s.kv_heads;
  const auto fuse = [&](const TestVector<float>& q, const TestVector<float>& k, const TestVector<float>& v) {
    TestVector<float> fused;
    for (int64_t i = 0; i < s.n; ++i)
      for (const auto& [part, heads] : {std::pair{&q, s.heads}, std::pair{&k, s.kv_heads}, std::pair{&v, s.kv_heads}})
        fused.insert(fused.end(), part->begin() + i * heads * s.head_size,
                     part->begin() + (i + 1) * heads * s.head_size);
    return fused;
  };
  const TestVector<float> zeros_q(p.query.size(), 0.0f), zeros_k(p.key.size(), 0.0f);
  Stored qkv(fuse(p.query, p.key, p.value), dtype());
  TestVector<float> out = fuse(zeros_q, zeros_k, zeros_k), d_qkv = out, lse(static_cast<size_t>(s.heads * s.n));
  TestVector<float> delta = lse;
  const Shape shape{s.n, all, s.head_size};
  const auto parts = [&](const Tensor& t) {
    return std::array{t.slice(1, 0, s.heads), t.slice(1, s.heads, s.heads + s.kv_heads),
                      t.slice(1, s.heads + s.kv_heads, all)};
  };
  Tensors tensors(p);
  AttentionBlock block = tensors.block({0, s.m});
  const auto [q, k, v] = parts(qkv.tensor(shape));
  block.query = q;
  block.key = k;
  block.value = v;
  Device& device = test_device(1);
  const Tensor out_tensor = f32_tensor(out, shape).slice(1, 0, s.heads);
  const Tensor lse_tensor = f32_tensor(lse, {s.heads, s.n}), delta_tensor = f32_tensor(delta, {s.heads, s.n});
  attention_state_init(device, out_tensor, lse_tensor);
  attend_with(implementation(), device, AttentionForward{block, StateUse::add, out_tensor, lse_tensor});
  attention_delta(device, out_tensor, tensors.d_out(), delta_tensor);
  const auto [dq, dk, dv] = parts(f32_tensor(d_qkv, shape));
  attend_with(implementation(), device,
              AttentionBackward{.block = block,
                                .out = {},
                                .d_out = tensors.d_out(),
                                .lse = lse_tensor,
                                .delta = delta_tensor,
                                .d_query = dq,
                                .d_key = dk,
                                .d_value = dv});
  device.synchronize();

  const Results<float> compact = run(implementation(), p);
  EXPECT_EQ(out, fuse(compact.out, zeros_k, zeros_k));
  EXPECT_EQ(lse, compact.lse);
  EXPECT_EQ(d_qkv, fuse(compact.d_query, compact.d_key, compact.d_value));
}

// The mean of the visible positions, and the log of their number.
void expect_probe(const AttentionImplementation& implementation, const Mask& mask, DType dtype,
                  const TestVector<double>& means) {
  const int64_t n = static_cast<int64_t>(mask.size());
  const Problem p = uniform_probe({n, n, 2, 1, 4}, mask, dtype);
  for (int64_t blocks : {1, 2, 4}) {
    Results<float> r;
    run_forward(implementation, p, {.blocks = equal_blocks(n, blocks)}, r);
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_NEAR(r.out[i * 8], means[static_cast<size_t>(i)], 1e-5) << "query " << i << ", " << blocks << " blocks";
      const Interval v = mask[static_cast<size_t>(i)];
      EXPECT_NEAR(r.lse[n + i], std::log(static_cast<double>(v.hi - v.lo)), 1e-6) << "query " << i;
    }
  }
}

TEST_P(Attention, B004_UniformProbeOfTheSmallestCausalRow) {
  expect_probe(implementation(), causal(4, 4), dtype(), {0, 0.5, 1, 1.5});
  expect_probe(implementation(), causal(8, 8), dtype(), {0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5});
}

TEST_P(Attention, B006_UniformProbeOfFullAttention) {
  expect_probe(implementation(), full(8, 8), dtype(), {3.5, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5});
}

TEST_P(Attention, B022_UniformProbeOfAWindow) {
  TestVector<double> means{0, 0.5, 1};
  for (int t = 3; t < 16; ++t) means.push_back(t - 1.5);
  EXPECT_EQ(means[8], 6.5);
  expect_probe(implementation(), window(16, 4), dtype(), means);
}

TEST_P(Attention, B034_UniformProbeOfTwoDocuments) {
  TestVector<double> means;
  for (int t = 0; t < 5; ++t) means.push_back(t / 2.0);
  for (int t = 5; t < 16; ++t) means.push_back((5 + t) / 2.0);
  expect_probe(implementation(), documents({5, 11}), dtype(), means);
}

}  // namespace
}  // namespace farspan::test
