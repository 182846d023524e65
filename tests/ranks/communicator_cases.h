// SPDX-License-Identifier: Apache-2.0
// Collectives against plain loops, and their byte counters against formulas, for every backend: a test program defines
// run_world() and has these tests. Sums are defined as sums in rank order in the tensor's own type, so results are
// compared bit for bit. Nothing is shared between ranks but what the collectives move.
#pragma once

#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <numeric>
#include <string>
#include <vector>

#include "comm/call_communicator.h"
#include "comm/collective_rules.h"
#include "comm/dry/dry_communicator.h"
#include "comm/world.h"
#include "parallel/grid.h"

namespace farspan {

// Runs body on ranks 0 to size - 1, and returns when all have ended. Defined by the program.
void run_world(int size, const RankBody& body);
// A world as large as the program's; cases that need more are left out.
int largest_world();

namespace {

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

void run_group(int size, const std::function<void(Communicator& group)>& body) {
  run_world(size, [&](int rank, World& world) {
    const auto group = world.group(rank, all_ranks(size), Dimension::cp);
    body(*group);
  });
}

// What rank `rank` holds at element i: the fraction of a multiple of the golden ratio, so that sums round.
template <typename T>
T value(int rank, int64_t i) {
  const double x = static_cast<double>(rank * 100'003 + i + 1) * 0.6180339887498949;
  return static_cast<T>(x - static_cast<double>(static_cast<int64_t>(x)) - 0.5);
}

template <typename T>
std::vector<T> values(int rank, int64_t count) {
  std::vector<T> x(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) x[static_cast<size_t>(i)] = value<T>(rank, i);
  return x;
}

template <typename T>
std::vector<T> sum_of_ranks(int size, int64_t count) {
  std::vector<T> sum = values<T>(0, count);
  for (int rank = 1; rank < size; ++rank)
    for (int64_t i = 0; i < count; ++i) sum[static_cast<size_t>(i)] += value<T>(rank, i);
  return sum;
}

template <typename T>
Tensor view(std::vector<T>& x) {
  return Tensor(x.data(), DTypeOf<T>::value, {static_cast<int64_t>(x.size())});
}

template <typename T>
Tensor piece(std::vector<T>& x, int64_t begin, int64_t count) {
  return Tensor(x.data() + begin, DTypeOf<T>::value, {count});
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

struct Case {
  int ranks;
  int64_t elements;
};

class Collectives : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (ranks() > largest_world()) GTEST_SKIP() << "a world of " << largest_world();
  }
  int ranks() const { return GetParam().ranks; }
  int64_t elements() const { return GetParam().elements; }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (int ranks : {1, 2, 3, 4, 8})
    for (int64_t elements : {0, 1, 7, 1000, 65537}) all.push_back({ranks, elements});
  return all;
}

std::string case_name(const testing::TestParamInfo<Case>& case_info) {
  return fmt::format("{}_ranks_{}_elements", case_info.param.ranks, case_info.param.elements);
}

INSTANTIATE_TEST_SUITE_P(Sizes, Collectives, testing::ValuesIn(cases()), case_name);

template <typename T>
void check_all_reduce_of(int ranks, int64_t elements) {
  const std::vector<T> expected = sum_of_ranks<T>(ranks, elements);
  run_group(ranks, [&](Communicator& group) {
    std::vector<T> data = values<T>(group.rank(), elements);
    group.all_reduce(view(data), "sum").wait();
    EXPECT_TRUE(same_bits(data, expected)) << "rank " << group.rank();
    const Segment own = segment_of(elements, group.rank(), ranks);
    const int64_t moved = (own.count * (ranks - 1) + elements - own.count) * static_cast<int64_t>(sizeof(T));
    EXPECT_EQ(group.traffic().bytes_received, moved);
    EXPECT_EQ(group.traffic().bytes_sent, moved);
    if (elements % ranks == 0) {
      EXPECT_EQ(moved, 2 * elements * static_cast<int64_t>(sizeof(T)) * (ranks - 1) / ranks);
    }
    EXPECT_EQ(group.traffic().calls, 1);
  });
}

TEST_P(Collectives, AllReduceF32) { check_all_reduce_of<float>(ranks(), elements()); }
TEST_P(Collectives, AllReduceF64) { check_all_reduce_of<double>(ranks(), elements()); }

TEST_P(Collectives, AllGather) {
  std::vector<float> expected;
  for (int rank = 0; rank < ranks(); ++rank)
    for (float x : values<float>(rank, elements())) expected.push_back(x);
  run_group(ranks(), [&](Communicator& group) {
    std::vector<float> part = values<float>(group.rank(), elements());
    std::vector<float> whole(expected.size(), -1);
    group.all_gather(view(part), view(whole), "gather").wait();
    EXPECT_TRUE(same_bits(whole, expected));

    // In place: the part is the rank's own piece of the whole.
    std::vector<float> in_place(expected.size(), -1);
    const int64_t begin = group.rank() * elements();
    std::copy(part.begin(), part.end(), in_place.begin() + begin);
    group.all_gather(piece(in_place, begin, elements()), view(in_place), "gather in place").wait();
    EXPECT_TRUE(same_bits(in_place, expected));
    EXPECT_EQ(group.traffic().bytes_received, 2 * 4 * elements() * (ranks() - 1));
    EXPECT_EQ(group.traffic().bytes_sent, 2 * 4 * elements() * (ranks() - 1));
  });
}

template <typename T>
void check_reduce_scatter_of(int ranks, int64_t elements) {
  const std::vector<T> sum = sum_of_ranks<T>(ranks, elements * ranks);
  run_group(ranks, [&](Communicator& group) {
    const auto begin = sum.begin() + group.rank() * elements;
    const std::vector<T> expected(begin, begin + elements);
    std::vector<T> whole = values<T>(group.rank(), elements * ranks);
    std::vector<T> part(static_cast<size_t>(elements), -1);
    group.reduce_scatter(view(whole), view(part), "scatter").wait();
    EXPECT_TRUE(same_bits(part, expected));
    EXPECT_TRUE(same_bits(whole, values<T>(group.rank(), elements * ranks))) << "input changed";
    group.reduce_scatter(view(whole), piece(whole, group.rank() * elements, elements), "scatter in place").wait();
    const auto own = whole.begin() + group.rank() * elements;
    EXPECT_TRUE(same_bits(std::vector<T>(own, own + elements), expected));
    EXPECT_EQ(group.traffic().bytes_received, 2 * static_cast<int64_t>(sizeof(T)) * elements * (ranks - 1));
    EXPECT_EQ(group.traffic().bytes_sent, group.traffic().bytes_received);
  });
}

TEST_P(Collectives, ReduceScatterF32) { check_reduce_scatter_of<float>(ranks(), elements()); }
TEST_P(Collectives, ReduceScatterF64) { check_reduce_scatter_of<double>(ranks(), elements()); }

TEST_P(Collectives, AllToAll) {
  const int64_t n = elements();
  run_group(ranks(), [&](Communicator& group) {
    std::vector<float> send = values<float>(group.rank(), n * ranks());
    std::vector<float> receive(send.size(), -1);
    group.all_to_all(view(send), view(receive), "transpose").wait();
    std::vector<float> expected;
    for (int from = 0; from < ranks(); ++from)
      for (int64_t i = 0; i < n; ++i) expected.push_back(value<float>(from, group.rank() * n + i));
    EXPECT_TRUE(same_bits(receive, expected));
    EXPECT_EQ(group.traffic().bytes_received, 4 * n * (ranks() - 1));
    EXPECT_EQ(group.traffic().bytes_sent, 4 * n * (ranks() - 1));
  });
}

// Every rank sends two messages to each rank, itself included, of different sizes, and receives them in its own order.
TEST_P(Collectives, ExchangeMatchesMessagesByOrderOfEachPair) {
  const int64_t n = elements();
  run_group(ranks(), [&](Communicator& group) {
    const int me = group.rank();
    std::vector<float> first = values<float>(me, n);
    std::vector<double> second = values<double>(me, n / 2);
    std::vector<Message> sends, receives;
    for (int to = 0; to < ranks(); ++to) {
      sends.push_back({to, view(first)});
      sends.push_back({to, view(second)});
    }
    std::vector<std::vector<float>> firsts(static_cast<size_t>(ranks()), std::vector<float>(first.size(), -1));
    std::vector<std::vector<double>> seconds(static_cast<size_t>(ranks()), std::vector<double>(second.size(), -1));
    for (int from = ranks() - 1; from >= 0; --from) receives.push_back({from, view(firsts[static_cast<size_t>(from)])});
    for (int from = 0; from < ranks(); ++from) receives.push_back({from, view(seconds[static_cast<size_t>(from)])});
    group.exchange(sends, receives, "all pairs").wait();
    for (int from = 0; from < ranks(); ++from) {
      EXPECT_TRUE(same_bits(firsts[static_cast<size_t>(from)], values<float>(from, n)));
      EXPECT_TRUE(same_bits(seconds[static_cast<size_t>(from)], values<double>(from, n / 2)));
    }
    EXPECT_EQ(group.traffic().bytes_sent, (4 * n + 8 * (n / 2)) * (ranks() - 1));
    EXPECT_EQ(group.traffic().bytes_received, (4 * n + 8 * (n / 2)) * (ranks() - 1));
  });
}

TEST_P(Collectives, DryCommunicatorCountsTheSameBytes) {
  const int64_t n = elements();
  const auto calls = [&](Communicator& group, std::vector<float>& whole, std::vector<float>& other) {
    const int next = (group.rank() + 1) % ranks();
    const int previous = (group.rank() + ranks() - 1) % ranks();
    group.all_reduce(piece(whole, 0, n), "a").wait();
    group.all_gather(piece(other, 0, n), view(whole), "b").wait();
    group.reduce_scatter(view(whole), piece(other, 0, n), "c").wait();
    group.all_to_all(view(whole), view(other), "d").wait();
    const Message send{next, piece(whole, 0, n)};
    const Message receive{previous, piece(other, 0, n)};
    group.exchange({&send, 1}, {&receive, 1}, "e").wait();
    group.barrier("f");
  };
  run_group(ranks(), [&](Communicator& group) {
    std::vector<float> whole(static_cast<size_t>(n * ranks())), other(whole.size());
    calls(group, whole, other);
    const auto dry = make_dry_communicator(Dimension::cp, group.rank(), group.ranks());
    std::vector<float> untouched(whole.size(), 3), also_untouched(whole.size(), 4);
    calls(*dry, untouched, also_untouched);
    EXPECT_EQ(untouched, std::vector<float>(whole.size(), 3));
    EXPECT_EQ(also_untouched, std::vector<float>(whole.size(), 4));
    EXPECT_EQ(dry->traffic().bytes_sent, group.traffic().bytes_sent);
    EXPECT_EQ(dry->traffic().bytes_received, group.traffic().bytes_received);
    EXPECT_EQ(dry->traffic().calls, 6);
    EXPECT_EQ(group.traffic().calls, 6);
    EXPECT_EQ(dry->traffic().exposed_seconds, 0);
    group.reset_traffic();
    EXPECT_EQ(group.traffic().bytes_sent, 0);
  });
}

TEST(Communicator, RanksFollowTheGroupsOrder) {
  run_world(3, [](int rank, World& world) {
    const auto group = world.group(rank, {2, 0, 1}, Dimension::dp);
    EXPECT_EQ(group->rank(), (rank + 1) % 3);
    EXPECT_EQ(group->dimension(), Dimension::dp);
    std::vector<int32_t> part = {rank}, whole(3);
    group->all_gather(view(part), view(whole), "ranks").wait();
    EXPECT_EQ(whole, (std::vector<int32_t>{2, 0, 1}));
  });
}

// Two hops in flight, waited for in an order that differs between the ranks.
TEST(Communicator, SeveralCallsMayBeOpenAndWaitedForInAnyOrder) {
  for (int ranks : {2, 3, 4}) {
    run_group(ranks, [&](Communicator& group) {
      const int me = group.rank();
      const int next = (me + 1) % ranks;
      const int previous = (me + ranks - 1) % ranks;
      std::vector<float> a = values<float>(me, 500), b = values<float>(me + 100, 300), c = values<float>(me, 77);
      std::vector<float> a_in(500), b_in(300);
      const Message send_a{next, view(a)}, receive_a{previous, view(a_in)};
      const Message send_b{previous, view(b)}, receive_b{next, view(b_in)};
      Work first = group.exchange({&send_a, 1}, {&receive_a, 1}, "forwards");
      Work second = group.exchange({&send_b, 1}, {&receive_b, 1}, "backwards");
      Work third = group.all_reduce(view(c), "sum");
      Work* order[] = {&first, &second, &third};
      std::rotate(order, order + me % 3, order + 3);
      for (Work* work : order) work->wait();
      first.wait();  // again: nothing happens
      EXPECT_TRUE(same_bits(a_in, values<float>(previous, 500)));
      EXPECT_TRUE(same_bits(b_in, values<float>(next + 100, 300)));
      EXPECT_TRUE(same_bits(c, sum_of_ranks<float>(ranks, 77)));
    });
  }
}

// After wait the memory is the caller's: every rank overwrites what it sent at once.
TEST(Communicator, SentMemoryMayBeReusedAfterWait) {
  run_group(4, [](Communicator& group) {
    const int next = (group.rank() + 1) % 4;
    const int previous = (group.rank() + 3) % 4;
    std::vector<int64_t> out(2000), in(2000);
    for (int64_t turn = 0; turn < 200; ++turn) {
      std::fill(out.begin(), out.end(), turn * 4 + group.rank());
      const Message send{next, view(out)}, receive{previous, view(in)};
      group.exchange({&send, 1}, {&receive, 1}, "turn").wait();
      ASSERT_EQ(in, std::vector<int64_t>(2000, turn * 4 + previous));
    }
  });
}

TEST(Communicator, GroupsOfOneCopyLocallyAndCountNothing) {
  run_world(2, [](int rank, World& world) {
    const auto group = world.group(rank, {rank}, Dimension::tp);
    EXPECT_EQ(group->rank(), 0);
    EXPECT_EQ(group->size(), 1);
    std::vector<float> x = values<float>(rank, 9), y(9), z(9);
    group->all_reduce(view(x), "r").wait();
    EXPECT_TRUE(same_bits(x, values<float>(rank, 9)));
    group->all_gather(view(x), view(y), "g").wait();
    EXPECT_TRUE(same_bits(y, x));
    group->reduce_scatter(view(y), view(z), "s").wait();
    EXPECT_TRUE(same_bits(z, x));
    group->all_to_all(view(x), view(x), "t").wait();
    group->barrier("b");
    EXPECT_EQ(group->traffic().bytes_sent, 0);
    EXPECT_EQ(group->traffic().bytes_received, 0);
    EXPECT_EQ(group->traffic().calls, 5);
  });
}

// Groups inside a larger world: pieces go by the rank within the group, whatever world ranks make it up.
TEST(Communicator, B021_GroupsInsideALargerWorld) {
  for (const GridSizes sizes : {GridSizes{.cp = 2, .dp = 2}, GridSizes{.tp = 2, .cp = 2}}) {
    const Grid grid(sizes, "tp-cp-dp-pp");
    run_world(4, [&](int rank, World& world) {
      for (Dimension dimension : {Dimension::tp, Dimension::cp, Dimension::dp, Dimension::dp_cp}) {
        const std::vector<int> ranks = grid.group_of(rank, dimension);
        const int size = static_cast<int>(ranks.size());
        const auto group = world.group(rank, ranks, dimension);
        for (int step = 0; step < 2; ++step) {
          std::vector<float> whole = values<float>(rank, 6 * size), part(6);
          std::vector<float> gathered(static_cast<size_t>(6 * size));
          group->reduce_scatter(view(whole), view(part), "gradient").wait();
          group->all_gather(view(part), view(gathered), "parameter").wait();
          std::vector<float> expected = values<float>(ranks[0], 6 * size);
          for (size_t member = 1; member < ranks.size(); ++member)
            for (int64_t i = 0; i < 6 * size; ++i) expected[static_cast<size_t>(i)] += value<float>(ranks[member], i);
          EXPECT_TRUE(same_bits(gathered, expected)) << name_of(dimension) << " group of rank " << rank;
        }
      }
    });
  }
}

// Calls of one group do not wait for calls of another.
TEST(Communicator, GroupsAreIndependent) {
  const Grid grid({.tp = 2, .cp = 2}, "tp-cp-dp-pp");
  run_world(4, [&](int rank, World& world) {
    const auto cp = world.group(rank, grid.group_of(rank, Dimension::cp), Dimension::cp);
    const auto tp = world.group(rank, grid.group_of(rank, Dimension::tp), Dimension::tp);
    const auto same_ranks = world.group(rank, grid.group_of(rank, Dimension::tp), Dimension::tp);
    std::vector<float> x(64, 1), y(64, 2), z(64, 3);
    Work hop = cp->all_reduce(view(x), "cp");
    Work other = same_ranks->all_reduce(view(z), "tp again");
    tp->all_reduce(view(y), "tp").wait();
    hop.wait();
    other.wait();
    EXPECT_EQ(x, std::vector<float>(64, 2));
    EXPECT_EQ(y, std::vector<float>(64, 4));
    EXPECT_EQ(z, std::vector<float>(64, 6));
    EXPECT_EQ(cp->traffic().calls, 1);
  });
}

// What carries data elsewhere than in the group that checks the calls rests on these two.
TEST(Communicator, AnnouncedCallsMeetAndMoveNothing) {
  run_group(3, [](Communicator& group) {
    auto* host = dynamic_cast<CallCommunicator*>(&group);
    if (host == nullptr) return;
    std::vector<float> x = values<float>(group.rank(), 30), y(10, -1);
    CallArguments sum;
    sum.operation = Operation::all_reduce;
    sum.dtype = DType::f32;
    sum.bytes = 4 * 30;
    sum.label = "sum";
    CallArguments hop;
    hop.operation = Operation::exchange;
    hop.sends = {{(group.rank() + 1) % 3, piece(x, 0, 10)}};
    hop.receives = {{(group.rank() + 2) % 3, view(y)}};
    hop.label = "hop";
    Work first = host->announce(sum);
    Work second = host->announce(hop);
    second.wait();
    first.wait();
    EXPECT_TRUE(same_bits(x, values<float>(group.rank(), 30)));
    EXPECT_EQ(y, std::vector<float>(10, -1));
    EXPECT_EQ(group.traffic().calls, 0);
    group.all_reduce(view(x), "in earnest").wait();
    EXPECT_TRUE(same_bits(x, sum_of_ranks<float>(3, 30)));
  });
}

// A ring of an odd number of ranks: after size hops every rank's block is home again, having been everywhere.
TEST(Communicator, B029_OddRingsFinish) {
  for (int ranks : {3, 5}) {
    run_group(ranks, [&](Communicator& group) {
      const int next = (group.rank() + 1) % ranks;
      const int previous = (group.rank() + ranks - 1) % ranks;
      std::vector<float> held = values<float>(group.rank(), 400), arriving(400);
      for (int hop = 1; hop <= ranks; ++hop) {
        const Message send{next, view(held)}, receive{previous, view(arriving)};
        group.exchange({&send, 1}, {&receive, 1}, fmt::format("hop {}", hop)).wait();
        std::swap(held, arriving);
        EXPECT_TRUE(same_bits(held, values<float>((group.rank() + ranks * hop - hop) % ranks, 400)));
      }
      EXPECT_EQ(group.traffic().bytes_received, 400 * 4 * ranks);
    });
  }
}

}  // namespace
}  // namespace farspan
