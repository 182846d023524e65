// SPDX-License-Identifier: Apache-2.0
// Collectives among thread ranks: the cases of every backend, and what needs memory that the ranks share.
#include "comm/communicator.h"

#include <atomic>
#include <chrono>
#include <fstream>
#include <gtest/gtest.h>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "comm/threads/thread_world.h"
#include "tests/ranks/communicator_cases.h"

namespace farspan {

void run_world(int size, const RankBody& body) {
  constexpr double kTimeout = 30;
  run_thread_ranks(size, kTimeout, body);
}
int largest_world() { return 8; }

namespace {

TEST(Communicator, BytesReadAreBytesSentOverAllRanks) {
  for (int ranks : {2, 3, 5}) {
    std::vector<Traffic> traffic(static_cast<size_t>(ranks));
    run_group(ranks, [&](Communicator& group) {
      std::vector<float> data = values<float>(group.rank(), 1001);
      group.all_reduce(view(data), "uneven").wait();
      traffic[static_cast<size_t>(group.rank())] = group.traffic();
    });
    int64_t sent = 0, received = 0;
    for (const Traffic& t : traffic) {
      sent += t.bytes_sent;
      received += t.bytes_received;
    }
    EXPECT_EQ(sent, received);
    EXPECT_EQ(received, int64_t{2} * 1001 * 4 * (ranks - 1));
  }
}

TEST(Communicator, RepeatedRunsGiveTheSameBits) {
  std::vector<float> first;
  for (int run = 0; run < 5; ++run) {
    std::vector<std::vector<float>> results(4);
    run_group(4, [&](Communicator& group) {
      std::vector<float> data = values<float>(group.rank(), 4099);
      // Another rank comes last in every run.
      if (group.rank() == run % 4) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      group.all_reduce(view(data), "sum").wait();
      results[static_cast<size_t>(group.rank())] = data;
    });
    if (run == 0) first = results[0];
    for (const std::vector<float>& result : results) EXPECT_TRUE(same_bits(result, first));
  }
}

TEST(Communicator, PostingDoesNotWaitForTheOthers) {
  std::latch posted(1);
  run_group(2, [&](Communicator& group) {
    std::vector<float> data(10, static_cast<float>(group.rank()));
    if (group.rank() == 1) posted.wait();
    Work work = group.all_reduce(view(data), "early");
    if (group.rank() == 0) posted.count_down();  // would never be reached if posting blocked
    work.wait();
    EXPECT_EQ(data, std::vector<float>(10, 1));
  });
}

TEST(Communicator, ExchangeWaitsForItsPeersOnly) {
  std::latch finished(2);
  run_group(4, [&](Communicator& group) {
    std::vector<float> out(8, static_cast<float>(group.rank())), in(8);
    const int peer = group.rank() ^ 1;
    const Message send{peer, view(out)}, receive{peer, view(in)};
    if (group.rank() >= 2) finished.wait();  // ranks 0 and 1 must finish without us
    group.exchange({&send, 1}, {&receive, 1}, "pair").wait();
    if (group.rank() < 2) finished.count_down();
    EXPECT_EQ(in, std::vector<float>(8, static_cast<float>(peer)));
  });
}

TEST(Communicator, BarrierHoldsUntilAllHaveCome) {
  std::atomic<int> come = 0;
  run_group(4, [&](Communicator& group) {
    for (int turn = 1; turn <= 20; ++turn) {
      ++come;
      group.barrier("turn");
      EXPECT_GE(come.load(), 4 * turn);
    }
    EXPECT_GT(group.traffic().exposed_seconds, 0);
  });
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
int64_t peak_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (word == "VmHWM:") {
      int64_t kib = 0;
      status >> kib;
      return kib * 1024;
    }
  return -1;
}

TEST(Communicator, NoStagingMemory) {
  constexpr int64_t kBytes = 64 << 20;
  run_group(2, [](Communicator& group) {
    std::vector<float> whole(kBytes / 4, 1), part(kBytes / 8, 1);
    group.barrier("filled");
    const int64_t before = peak_resident_bytes();
    group.barrier("measured");
    group.all_reduce(view(whole), "reduce").wait();
    group.all_gather(view(part), view(whole), "gather").wait();
    group.reduce_scatter(view(whole), view(part), "scatter").wait();
    const Message send{1 - group.rank(), piece(whole, 0, kBytes / 8)};
    const Message receive{1 - group.rank(), view(part)};
    group.exchange({&send, 1}, {&receive, 1}, "exchange").wait();
    group.barrier("moved");
    // One staged message would be 32 MiB; stacks and bookkeeping stay far below 4.
    EXPECT_LT(peak_resident_bytes() - before, 4 << 20);
    EXPECT_GT(before, 2 * kBytes);
  });
}
#endif

}  // namespace
}  // namespace farspan
