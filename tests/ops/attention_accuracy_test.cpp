// SPDX-License-Identifier: Apache-2.0
// How good the numbers are: cutting a row into blocks, long sums, and gradients against finite differences.
#include <gtest/gtest.h>
#include <numeric>

#include "tests/ops/attention_case.h"

namespace farspan::test {
namespace {

class AttentionAccuracy : public AttentionTest {};

INSTANTIATE_TEST_SUITE_P(EveryImplementation, AttentionAccuracy, ::testing::ValuesIn(attention_variants()),
                         attention_variant_name);

// Root mean square of the differences over that of the expected values; steadier than the worst of them.
double rms_error(const TestVector<float>& found, const TestVector<double>& expected) {
  double difference = 0, signal = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    difference += (found[i] - expected[i]) * (found[i] - expected[i]);
    signal += expected[i] * expected[i];
  }
  return std::sqrt(difference / signal);
}

// What a model sees: the result in its own type.
TestVector<float> rounded(TestVector<float> values, DType dtype) {
  if (dtype == DType::bf16)
    for (float& x : values) x = to_float(to_bfloat16(x));
  return values;
}

std::vector<std::vector<KeySpan>> orders_of(int64_t m, int64_t blocks) {
  const std::vector<KeySpan> ascending = equal_blocks(m, blocks);
  std::vector<KeySpan> descending(ascending.rbegin(), ascending.rend());
  std::vector<KeySpan> alternating;  // from both ends, as zigzag chunks arrive
  for (size_t b = 0; b < ascending.size(); ++b)
    alternating.push_back(b % 2 == 0 ? ascending[b / 2] : ascending[ascending.size() - 1 - b / 2]);
  return {ascending, descending, alternating};
}

TEST_P(AttentionAccuracy, B018_ErrorDoesNotGrowWithTheNumberOfBlocks) {
  const Problem p = random_problem({64, 256, 2, 1, 16}, causal(64, 256), dtype());
  const Results<double> expected = oracle(p);
  const Results<float> whole = run(implementation(), p);
  for (int64_t blocks : {1, 2, 4, 8, 16})
    for (const std::vector<KeySpan>& order : orders_of(256, blocks)) {
      SCOPED_TRACE(fmt::format("{} blocks", blocks));
      const Results<float> r = run(implementation(), p, {.blocks = order});
      // The state between blocks is fp32: each hand-over costs at most a rounding of out and of lse.
      const double handovers = std::sqrt(static_cast<double>(blocks)) * 6e-8;
      EXPECT_LE(rms_error(r.out, expected.out), 1.5 * rms_error(whole.out, expected.out) + handovers);
      EXPECT_LE(relative_error(r.lse, expected.lse), 3e-7);
      EXPECT_LE(rms_error(r.d_query, expected.d_query), 1.5 * rms_error(whole.d_query, expected.d_query) + handovers);
      EXPECT_LE(rms_error(r.d_key, expected.d_key), 1.5 * rms_error(whole.d_key, expected.d_key) + handovers);
      EXPECT_LE(rms_error(r.d_value, expected.d_value), 1.5 * rms_error(whole.d_value, expected.d_value) + handovers);
      if (dtype() == DType::bf16) {
        EXPECT_LE(rms_error(rounded(r.out, dtype()), expected.out),
                  1.5 * rms_error(rounded(whole.out, dtype()), expected.out));
      }
    }
}

// 8192 keys of nearly equal weight: the sums have as many terms as keys, and their errors must not.
TEST_P(AttentionAccuracy, LongSums) {
  Problem p = random_problem({6, 8192, 1, 1, 8}, full(6, 8192), dtype());
  for (float& v : p.value) v = to_float(to_bfloat16(1 + 0.25f * v));  // a mean of 1 to hold the error against
  const Results<double> expected = oracle(p);
  const Results<float> found = run(implementation(), p);
  // Summing a tile first and tiles second keeps 8192 terms to a few roundings of 6e-8; measured 5e-7.
  EXPECT_LE(relative_error(found.out, expected.out), out_tolerance(dtype()));
  EXPECT_LE(relative_error(found.lse, expected.lse), 2e-7);
  EXPECT_LE(relative_error(found.d_value, expected.d_value), std::max(2e-6, gradient_tolerance(dtype())));
}

TEST_P(AttentionAccuracy, LongSumsOverQueries) {
  const Problem p = random_problem({8192, 5, 1, 1, 8}, full(8192, 5), dtype());
  const Results<double> expected = oracle(p);
  const Results<float> found = run(implementation(), p);
  EXPECT_LE(relative_error(found.d_value, expected.d_value), gradient_tolerance(dtype()));
  EXPECT_LE(relative_error(found.d_key, expected.d_key), gradient_tolerance(dtype()));
}

// <d_out, out> in fp64, through the oracle's forward.
double objective(const Problem& p) {
  const Results<double> r = oracle(p);
  return std::inner_product(r.out.begin(), r.out.end(), p.d_out.begin(), 0.0);
}

// Central differences of `objective` in each element of `values`, a part of `p`.
void expect_gradient(Problem& p, TestVector<float>& values, const TestVector<float>& gradient, double tolerance) {
  const double largest = std::abs(
      *std::max_element(gradient.begin(), gradient.end(), [](float a, float b) { return std::abs(a) < std::abs(b); }));
  // A power of two, so that x + h and x - h lie evenly about x; the error is then h^2 times a third derivative of
  // order 1.
  constexpr float kStep = 1.0f / 1024;
  for (size_t i = 0; i < values.size(); ++i) {
    const float x = values[i];
    values[i] = x + kStep;
    const double width_up = values[i];
    const double up = objective(p);
    values[i] = x - kStep;
    const double width = width_up - values[i];
    const double down = objective(p);
    values[i] = x;
    ASSERT_NEAR((up - down) / width, gradient[i], tolerance * largest + 1e-6) << "element " << i;
  }
}

TEST_P(AttentionAccuracy, GradientsEqualFiniteDifferences) {
  for (const double dropped : {0.0, 0.4}) {
    Problem p = random_problem({7, 9, 4, 2, 3}, causal(7, 9), dtype());
    p.mask[2] = {1, 4};
    p.mask[5] = {3, 3};
    p.dropout = {.probability = dropped, .key = 11};
    const Results<float> r = run(implementation(), p);
    const double tolerance = std::max(1e-5, gradient_tolerance(dtype()));
    expect_gradient(p, p.query, r.d_query, tolerance);
    expect_gradient(p, p.key, r.d_key, tolerance);
    expect_gradient(p, p.value, r.d_value, tolerance);
  }
}

}  // namespace
}  // namespace farspan::test
