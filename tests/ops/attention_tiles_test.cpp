// SPDX-License-Identifier: Apache-2.0
// Block attention at the edges of the kernels' tiles (64 to 192 queries, 64 or 128 keys, heads of 64, 128 and 256),
// smallest first and one thing more in each test, forward and backward apart: the first that fails says where to look.
// Backward starts from the oracle's output, so that a wrong forward does not hide it.
#include <gtest/gtest.h>

#include "tests/ops/attention_case.h"

namespace farspan::test {
namespace {

class AttentionTiles : public AttentionTest {
 protected:
  void expect_forward(const Problem& p, const RunOptions& options = {}) const {
    SCOPED_TRACE(p.sizes.str());
    const Results<double> expected = oracle(p);
    Results<float> found;
    run_forward(implementation(), p, options, found);
    // The mean of hundreds of values, or a lone score, is small beside the terms of its sum and their error.
    EXPECT_LE(relative_error(found.out, expected.out), std::max(2e-6, out_tolerance(dtype())));
    EXPECT_LE(relative_error(found.lse, expected.lse), 4 * kLseTolerance);
  }

  void expect_backward(const Problem& p, const RunOptions& options = {}) const {
    SCOPED_TRACE(p.sizes.str());
    const Results<double> expected = oracle(p);
    Results<float> found;
    found.out.assign(expected.out.begin(), expected.out.end());
    found.lse.assign(expected.lse.begin(), expected.lse.end());
    run_backward(implementation(), p, options, found);
    EXPECT_LE(relative_error(found.d_query, expected.d_query), gradient_tolerance(dtype()));
    EXPECT_LE(relative_error(found.d_key, expected.d_key), gradient_tolerance(dtype()));
    EXPECT_LE(relative_error(found.d_value, expected.d_value), gradient_tolerance(dtype()));
  }

  Problem problem(const Sizes& sizes, const Mask& mask) const { return random_problem(sizes, mask, dtype()); }
};

// Runs `expect(head_size)` for each.
void for_head_sizes(auto&& expect) {
  for (int64_t head_size : {64, 128, 256}) expect(head_size);
}

INSTANTIATE_TEST_SUITE_P(EveryImplementation, AttentionTiles, ::testing::ValuesIn(attention_variants()),
                         attention_variant_name);

TEST_P(AttentionTiles, ForwardOneTile) {
  for_head_sizes([&](int64_t D) { expect_forward(problem({64, 128, 1, 1, D}, full(64, 128))); });
}

TEST_P(AttentionTiles, ForwardSeveralTilesOfKeys) {
  for_head_sizes([&](int64_t D) { expect_forward(problem({64, 640, 1, 1, D}, full(64, 640))); });
}

TEST_P(AttentionTiles, ForwardSeveralTilesOfQueries) {
  for_head_sizes([&](int64_t D) { expect_forward(problem({200, 128, 1, 1, D}, full(200, 128))); });
}

TEST_P(AttentionTiles, ForwardCausal) {
  for_head_sizes([&](int64_t D) { expect_forward(problem({256, 256, 1, 1, D}, causal(256, 256))); });
}

TEST_P(AttentionTiles, ForwardHeads) {
  for_head_sizes([&](int64_t D) { expect_forward(problem({64, 192, 6, 2, D}, causal(64, 192))); });
}

TEST_P(AttentionTiles, ForwardTails) {
  for (int64_t n : {1, 63, 65, 127, 129, 193})
    for (int64_t m : {1, 63, 65, 129, 257})
      for (const Mask& mask : {full(n, m), causal(n, m)})
        expect_forward(problem({n, m, 1, 1, n % 4 == 1 ? 64 : 128}, mask));
  expect_forward(problem({129, 193, 2, 1, 256}, causal(129, 193)));
}

// More queries than keys: the first tiles of queries see nothing and have nothing to wait for.
TEST_P(AttentionTiles, ForwardTilesThatSeeNothing) {
  for_head_sizes([&](int64_t D) { expect_forward(problem({600, 70, 1, 1, D}, causal(600, 70))); });
}

TEST_P(AttentionTiles, ForwardAddsToTheState) {
  for_head_sizes([&](int64_t D) {
    expect_forward(problem({200, 520, 2, 1, D}, scattered(200, 520)), {.blocks = {{384, 520}, {0, 129}, {129, 384}}});
  });
}

TEST_P(AttentionTiles, BackwardOneTile) {
  for_head_sizes([&](int64_t D) { expect_backward(problem({64, 64, 1, 1, D}, full(64, 64))); });
}

TEST_P(AttentionTiles, BackwardSeveralTilesOfKeys) {
  for_head_sizes([&](int64_t D) { expect_backward(problem({64, 384, 1, 1, D}, full(64, 384))); });
}

TEST_P(AttentionTiles, BackwardSeveralTilesOfQueries) {
  for_head_sizes([&](int64_t D) { expect_backward(problem({384, 64, 1, 1, D}, full(384, 64))); });
}

TEST_P(AttentionTiles, BackwardCausal) {
  for_head_sizes([&](int64_t D) { expect_backward(problem({256, 256, 1, 1, D}, causal(256, 256))); });
}

TEST_P(AttentionTiles, BackwardHeads) {
  for_head_sizes([&](int64_t D) { expect_backward(problem({64, 192, 6, 2, D}, causal(64, 192))); });
}

TEST_P(AttentionTiles, BackwardTails) {
  for (int64_t n : {1, 63, 65, 129})
    for (int64_t m : {3, 63, 65, 129})  // the score of a lone key has no gradient
      for (const Mask& mask : {full(n, m), causal(n, m)})
        for (int64_t D : {n % 4 == 1 ? 64 : 128, 256}) expect_backward(problem({n, m, 1, 1, D}, mask));
}

TEST_P(AttentionTiles, BackwardTilesThatSeeNothingOrAreNotSeen) {
  for_head_sizes([&](int64_t D) {
    expect_backward(problem({400, 70, 1, 1, D}, causal(400, 70)));
    expect_backward(problem({70, 400, 1, 1, D}, window(70, 20)));
  });
}

TEST_P(AttentionTiles, BackwardAddsBlocks) {
  for_head_sizes([&](int64_t D) {
    expect_backward(problem({150, 300, 2, 1, D}, scattered(150, 300)), {.blocks = {{192, 300}, {0, 65}, {65, 192}}});
  });
}

}  // namespace
}  // namespace farspan::test
