// SPDX-License-Identifier: Apache-2.0
#include "ops/cuda/attention_key_tiles.h"

#include <algorithm>
#include <climits>
#include <gtest/gtest.h>
#include <vector>

#include "base/philox.h"

namespace farspan::cuda {
namespace {

struct Interval {
  int lo, hi;
};

// As attention_bounds.cu sums up the queries of a tile.
KeyTiles tiles_of(const std::vector<Interval>& queries, int step) {
  int first = INT_MAX, last = 0, all_first = 0, all_last = INT_MAX;
  for (const Interval& q : queries) {
    if (q.lo >= q.hi) {
      all_first = INT_MAX;
      all_last = 0;
      continue;
    }
    first = std::min(first, q.lo);
    last = std::max(last, q.hi);
    all_first = std::max(all_first, q.lo);
    all_last = std::min(all_last, q.hi);
  }
  return {first, last, all_first, all_last, step};
}

void expect_right(const std::vector<Interval>& queries, int keys, int step) {
  const KeyTiles tiles = tiles_of(queries, step);
  bool any = false, any_masked = false;
  std::vector<bool> visited(static_cast<size_t>(keys));
  for (int key = tiles.first; key < tiles.end; key += step) {
    any = true;
    ASSERT_EQ(key % step, 0);
    ASSERT_LT(key, keys);
    bool all = true;
    for (int j = key; j < key + step; ++j) {
      if (j < keys) visited[static_cast<size_t>(j)] = true;
      for (const Interval& q : queries) all &= q.lo <= j && j < q.hi;
    }
    ASSERT_EQ(tiles.masked(key), !all);
    any_masked |= !all;
    ASSERT_EQ(tiles.last() == key, key + step >= tiles.end);
  }
  ASSERT_EQ(tiles.any(), any);
  ASSERT_EQ(tiles.any_masked(), any_masked);
  for (const Interval& q : queries)
    for (int j = q.lo; j < q.hi; ++j) ASSERT_TRUE(visited[static_cast<size_t>(j)]);
}

TEST(AttentionKeyTiles, VisitAllThatIsSeenAndKnowWhatIsMasked) {
  const Philox random(3, "key tiles");
  uint64_t draw = 0;
  const auto below = [&](int end) { return static_cast<int>(random.uniform(draw++) * end); };
  for (int step : {64, 128})
    for (int i = 0; i < 2000; ++i) {
      const int keys = 1 + below(500);
      const int kind = below(4);  // causal, window, no order, all see all; some see nothing
      const int offset = below(600) - 100;
      std::vector<Interval> queries;
      for (int q = 0; q < 1 + below(8); ++q) {
        Interval v{0, keys};
        if (kind == 0) v = {0, std::clamp(offset + q, 0, keys)};
        if (kind == 1) v = {std::clamp(offset + q - 20, 0, keys), std::clamp(offset + q, 0, keys)};
        if (kind == 2) v = {below(keys + 1), below(keys + 1)};
        if (v.lo >= v.hi || below(20) == 0) v = {0, 0};
        queries.push_back(v);
      }
      expect_right(queries, keys, step);
      if (HasFatalFailure()) return;
    }
}

// A producer and its consumers, each with a ring of its own and a free and a full barrier a stage: what is waited for
// is always the phase that the other side ends next, over any number of rounds.
TEST(AttentionKeyTiles, RingsOfBothSidesMeet) {
  struct Barrier {
    int phase = 0;
    bool ended(int parity) const { return phase % 2 != parity; }
  };
  constexpr int kStages = 3;
  for (int total = 0; total < 20; ++total) {
    Barrier full[kStages], free[kStages];
    std::vector<int> stored(kStages, -1);
    Ring<kStages> producer, consumer;
    int made = 0, used = 0;
    while (used < total) {
      const int before = made + used;
      while (made < total && free[producer.stage].ended(producer.parity ^ 1)) {
        stored[static_cast<size_t>(producer.stage)] = made++;
        ++full[producer.stage].phase;
        producer.advance();
      }
      ASSERT_LE(made - used, kStages);
      while (full[consumer.stage].ended(consumer.parity)) {
        ASSERT_EQ(stored[static_cast<size_t>(consumer.stage)], used++);
        ++free[consumer.stage].phase;
        consumer.advance();
      }
      ASSERT_NE(made + used, before) << "both wait";
    }
    ASSERT_EQ(made, total);
  }
}

}  // namespace
}  // namespace farspan::cuda
