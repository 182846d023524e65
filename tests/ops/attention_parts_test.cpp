// SPDX-License-Identifier: Apache-2.0
// The parts into which a block falls, against the mask pair by pair.
#include "ops/attention_parts.h"

#include <gtest/gtest.h>

#include "tests/ops/attention_case.h"

namespace farspan::test {
namespace {

std::vector<VisibleRun> mask_runs(const Mask& mask) {
  std::vector<int64_t> lo, hi;
  for (const Interval& v : mask) {
    lo.push_back(v.lo);
    hi.push_back(v.hi);
  }
  return runs_of(lo, hi);
}

// What query i sees of the keys, counted from the first of them; {0, 0} for nothing.
Interval seen(const Mask& mask, int64_t i, KeySpan keys) {
  const Interval v = mask[static_cast<size_t>(i)];
  const int64_t lo = std::max(v.lo, keys.begin), hi = std::min(v.hi, keys.end);
  return lo < hi ? Interval{lo - keys.begin, hi - keys.begin} : Interval{0, 0};
}

PartForm form_of(const Mask& mask, const AttentionPart& part, KeySpan keys) {
  bool plain = true, causal = true, nothing = true;
  for (int64_t i = 0; i < part.queries(); ++i) {
    const Interval v = seen(mask, part.query_begin + i, keys);
    nothing = nothing && v.lo == v.hi;
    plain = plain && v.lo == part.key_begin && v.hi == part.key_end;
    causal = causal && v.lo < v.hi && v.lo == part.key_begin &&
             v.hi == std::min(part.key_end, part.key_begin + part.first_keys + i);
  }
  if (nothing) return PartForm::nothing;
  return plain ? PartForm::plain : causal ? PartForm::causal : PartForm::other;
}

void expect_parts(const Mask& mask, KeySpan keys) {
  const int64_t n = static_cast<int64_t>(mask.size());
  const std::vector<VisibleRun> runs = mask_runs(mask);
  const std::vector<AttentionPart> parts = attention_parts(runs, keys.begin, keys.end - keys.begin);
  int64_t next_query = 0, next_key = 0;
  for (const AttentionPart& part : parts) {
    ASSERT_EQ(part.query_begin, next_query);
    next_query = part.query_end;
    ASSERT_EQ(form_of(mask, part, keys), part.form) << part.query_begin << " to " << part.query_end;
    if (part.form != PartForm::nothing) {
      ASSERT_GE(part.key_begin, next_key);
      next_key = part.key_end;
    }
    int64_t pairs = 0;
    for (int64_t i = part.query_begin; i < part.query_end; ++i) {
      const Interval v = seen(mask, i, keys);
      pairs += v.hi - v.lo;
      if (v.lo == v.hi) continue;
      ASSERT_GE(v.lo, part.key_begin);
      ASSERT_LE(v.hi, part.key_end);
    }
    ASSERT_EQ(pairs, part.pairs);
    int64_t described = 0;
    for (const VisibleRun& run : part.runs) {
      ASSERT_EQ(run.first, described);
      for (int64_t i = 0; i < run.count; ++i) {
        const Interval v = mask[static_cast<size_t>(part.query_begin + run.first + i)];
        ASSERT_EQ(run.lo + i * run.lo_step, v.lo);
        ASSERT_EQ(run.hi + i * run.hi_step, v.hi);
      }
      described += run.count;
    }
    ASSERT_EQ(described, part.queries());
  }
  ASSERT_EQ(next_query, n);
}

TEST(AttentionParts, AgreeWithTheMaskForAnyCutOfTheKeys) {
  const std::vector<Mask> masks = {full(7, 12),
                                   causal(12, 12),
                                   causal(5, 12),
                                   causal(12, 5),
                                   window(12, 3),
                                   documents({1, 2, 4, 5}),
                                   documents({5, 5, 2}),
                                   prefix(12, 4),
                                   padded(12),
                                   scattered(12, 12),
                                   mask_from(12,
                                             [](int64_t i) {
                                               return i < 4 ? Interval{0, 4} : i < 9 ? Interval{4, 9} : Interval{0, 0};
                                             }),
                                   mask_from(12,
                                             [](int64_t i) {
                                               return Interval{i, 6};
                                             }),
                                   mask_from(12, [](int64_t i) {
                                     return Interval{4, i};
                                   })};
  for (size_t m = 0; m < masks.size(); ++m)
    for (int64_t begin = -2; begin < 12; ++begin)
      for (int64_t end = begin + 1; end < 15; ++end) {
        SCOPED_TRACE(fmt::format("mask {}, keys {} to {}", m, begin, end));
        expect_parts(masks[m], {begin, end});
        if (HasFatalFailure()) return;
      }
}

TEST(AttentionParts, FormsOfCommonBlocks) {
  const auto only = [](const Mask& mask, KeySpan keys) {
    const std::vector<AttentionPart> parts = attention_parts(mask_runs(mask), keys.begin, keys.end - keys.begin);
    EXPECT_EQ(parts.size(), 1u);
    return parts.at(0);
  };
  EXPECT_EQ(only(causal(8, 8), {0, 8}).form, PartForm::causal);
  EXPECT_EQ(only(causal(8, 8), {0, 8}).first_keys, 1);
  EXPECT_EQ(only(causal(4, 12), {0, 12}).first_keys, 9);
  EXPECT_EQ(only(causal(4, 12), {0, 8}).form, PartForm::plain);
  EXPECT_EQ(only(full(3, 9), {2, 5}).form, PartForm::plain);
  EXPECT_EQ(only(window(8, 3), {0, 8}).form, PartForm::other);

  const std::vector<AttentionPart> three = attention_parts(mask_runs(documents({5, 6, 7})), 0, 18);
  ASSERT_EQ(three.size(), 3u);
  for (const AttentionPart& part : three) EXPECT_EQ(part.form, PartForm::causal);
  // Runs that are as few as can be take the first token of the last document for one of the three of one token.
  const std::vector<AttentionPart> short_ones = attention_parts(mask_runs(documents({5, 1, 1, 1, 7})), 0, 15);
  ASSERT_EQ(short_ones.size(), 5u);
  for (const AttentionPart& part : short_ones) EXPECT_NE(part.form, PartForm::other);
  EXPECT_EQ(short_ones[4].form, PartForm::causal);
  EXPECT_EQ(short_ones[4].first_keys, 1);
  const AttentionPart both = join(three[0], three[1]);
  EXPECT_EQ(both.queries(), 11);
  EXPECT_EQ(both.key_end, 11);
  EXPECT_EQ(both.pairs, 15 + 21);
  EXPECT_EQ(both.runs, mask_runs(documents({5, 6})));
}

}  // namespace
}  // namespace farspan::test
