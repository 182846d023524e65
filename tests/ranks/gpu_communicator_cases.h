// SPDX-License-Identifier: Apache-2.0
// What is particular to collectives whose tensors lie on GPUs: every rank's queue runs at its own pace, and nothing but
// the collectives keeps them in order. A rank's compute stream is held up on purpose, so that a wait that is missing
// shows in the numbers.
#pragma once

#include <chrono>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <thread>
#include <vector>

#include "comm/cuda/delay.h"
#include "comm/threads/thread_world.h"
#include "device/device.h"
#include "tests/ranks/communicator_cases.h"
#include "tests/ranks/staged_world.h"

namespace farspan {

// What the tests of the program ask for.
GpuBackend tested_backend();

namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

using GpuRankBody = std::function<void(int rank, World& world, Device& device)>;

void run_gpu_ranks(int size, double timeout_seconds, const GpuRankBody& body) {
  if (largest_world() == 0 || size > largest_world())
    GTEST_SKIP() << "the GPUs here are for " << largest_world() << " ranks";
  constexpr double kGraceSeconds = 10;
  run_thread_ranks(
      size, timeout_seconds,
      [&](int rank, World& world) {
        Device device(DeviceKind::cuda, 1, world.gpu_of(rank));
        body(rank, world, device);
      },
      kGraceSeconds, tested_backend());
}

// A vector on the GPU, filled and read through the compute stream.
class GpuVector {
 public:
  GpuVector(Device& device, int64_t count) : device_(device), memory_(device, count * 4), count_(count) {}
  void fill(const std::vector<float>& x) { copy_to_device(device_, x.data(), memory_.data(), std::ssize(x) * 4); }
  std::vector<float> read() const {
    std::vector<float> x(static_cast<size_t>(count_));
    copy_to_host(device_, memory_.data(), x.data(), count_ * 4);
    return x;
  }
  Tensor view() const { return Tensor(memory_.data(), DType::f32, {count_}); }
  Tensor piece(int64_t begin, int64_t count) const { return view().slice(0, begin, begin + count); }

 private:
  Device& device_;
  DeviceMemory memory_;
  int64_t count_;
};

// The largest group to test with.
int several() { return std::min(4, largest_world()); }

constexpr int64_t kTurnElements = 40'000;

// One call of one kind: what goes in on each rank, what must come out.
struct Kind {
  const char* name;
  std::function<Work(Communicator&, const GpuVector& source, const GpuVector& target)> start;
  std::function<std::vector<float>(int rank, int ranks, int turn)> expected;
};

int seed(int rank, int turn) { return rank + 10 * turn; }

std::vector<float> sum_in_turn(int ranks, int turn) {
  std::vector<float> sum = values<float>(seed(0, turn), kTurnElements);
  for (int rank = 1; rank < ranks; ++rank)
    for (int64_t i = 0; i < kTurnElements; ++i) sum[static_cast<size_t>(i)] += value<float>(seed(rank, turn), i);
  return sum;
}

std::vector<float> part_of(const std::vector<float>& x, int64_t begin, int64_t count) {
  return {x.begin() + begin, x.begin() + begin + count};
}

std::vector<Kind> kinds() {
  const auto piece_of = [](int ranks) { return kTurnElements / ranks; };
  return {
      {"exchange",
       [](Communicator& group, const GpuVector& source, const GpuVector& target) {
         const Message send{(group.rank() + 1) % group.size(), source.view()};
         const Message receive{(group.rank() + group.size() - 1) % group.size(), target.view()};
         return group.exchange({&send, 1}, {&receive, 1}, "hop");
       },
       [](int rank, int ranks, int turn) {
         return values<float>(seed((rank + ranks - 1) % ranks, turn), kTurnElements);
       }},
      {"all_gather",
       [piece_of](Communicator& group, const GpuVector& source, const GpuVector& target) {
         return group.all_gather(source.piece(0, piece_of(group.size())), target.view(), "gather");
       },
       [piece_of](int, int ranks, int turn) {
         std::vector<float> whole;
         for (int rank = 0; rank < ranks; ++rank)
           for (float x : values<float>(seed(rank, turn), piece_of(ranks))) whole.push_back(x);
         return whole;
       }},
      {"reduce_scatter",
       [piece_of](Communicator& group, const GpuVector& source, const GpuVector& target) {
         return group.reduce_scatter(source.view(), target.piece(0, piece_of(group.size())), "scatter");
       },
       [piece_of](int rank, int ranks, int turn) {
         return part_of(sum_in_turn(ranks, turn), rank * piece_of(ranks), piece_of(ranks));
       }},
      {"all_to_all",
       [](Communicator& group, const GpuVector& source, const GpuVector& target) {
         return group.all_to_all(source.view(), target.view(), "transpose");
       },
       [piece_of](int rank, int ranks, int turn) {
         std::vector<float> received;
         for (int from = 0; from < ranks; ++from)
           for (float x :
                part_of(values<float>(seed(from, turn), kTurnElements), rank * piece_of(ranks), piece_of(ranks)))
             received.push_back(x);
         return received;
       }},
      {"all_reduce",
       [](Communicator& group, const GpuVector& source, const GpuVector&) {
         return group.all_reduce(source.view(), "sum");
       },
       [](int, int ranks, int turn) { return sum_in_turn(ranks, turn); }},
  };
}

bool reads_source(const Kind& kind) { return std::string(kind.name) == "all_reduce"; }

// Sums of more than two ranks depend on the order, which is NCCL's own.
void expect_values(const std::vector<float>& found, const std::vector<float>& expected, const std::string& what) {
  ASSERT_GE(found.size(), expected.size());
  const float tolerance = tested_backend() == GpuBackend::nccl && several() > 2 ? 1e-6F : 0;
  int64_t wrong = 0, first = -1;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::abs(found[i] - expected[i]) <= tolerance) continue;
    if (wrong++ == 0) first = static_cast<int64_t>(i);
  }
  EXPECT_EQ(wrong, 0) << what << ": first at element " << first << ": " << found[static_cast<size_t>(first)] << ", not "
                      << expected[static_cast<size_t>(first)];
}

// In every turn another rank's compute stream is late, before it fills its memory or before it starts the call; all
// reuse the same two vectors at once, through their streams alone.
TEST(GpuCommunicator, LateStreamsNeitherGiveNorTakeWrongData) {
  const int ranks = several();
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    constexpr int kTurns = 12;
    run_gpu_ranks(ranks, 30, [&](int rank, World& world, Device& device) {
      const auto group = world.group(rank, all_ranks(ranks), Dimension::cp, device);
      GpuVector source(device, kTurnElements), target(device, kTurnElements);
      // What each turn leaves is kept on the GPU until the end: reading it would make the rank's thread wait.
      std::vector<std::unique_ptr<GpuVector>> results;
      for (int turn = 0; turn < kTurns; ++turn) results.push_back(std::make_unique<GpuVector>(device, kTurnElements));
      const auto keep = world.group(rank, {rank}, Dimension::tp, device);
      std::vector<std::vector<float>> filling;
      for (int turn = 0; turn < kTurns; ++turn) filling.push_back(values<float>(seed(rank, turn), kTurnElements));
      for (int turn = 0; turn < kTurns; ++turn) {
        const bool late = turn % ranks == rank;
        if (late && turn % 2 == 0) delay_compute(device, 0.01);
        source.fill(filling[static_cast<size_t>(turn)]);
        if (late && turn % 2 == 1) delay_compute(device, 0.01);
        Work work = kind.start(*group, source, target);
        if (turn % 3 == 0) delay_compute(device, 0.001);  // something to compute meanwhile
        work.wait();
        keep->all_gather((reads_source(kind) ? source : target).view(), results[static_cast<size_t>(turn)]->view(),
                         "keep")
            .wait();
      }
      for (int turn = 0; turn < kTurns; ++turn)
        expect_values(results[static_cast<size_t>(turn)]->read(), kind.expected(rank, ranks, turn),
                      fmt::format("rank {}, turn {}", rank, turn));
    });
  }
}

// Two calls of one group and one of another are open at once, over and over.
TEST(GpuCommunicator, OpenCallsOfTwoGroupsWithLateStreams) {
  const int ranks = several();
  run_gpu_ranks(ranks, 30, [&](int rank, World& world, Device& device) {
    const auto first = world.group(rank, all_ranks(ranks), Dimension::cp, device);
    const auto second = world.group(rank, all_ranks(ranks), Dimension::dp, device);
    GpuVector a(device, kTurnElements), b(device, kTurnElements), c(device, kTurnElements), d(device, kTurnElements);
    for (int turn = 0; turn < 12; ++turn) {
      if (turn % ranks == rank) delay_compute(device, 0.005);
      a.fill(values<float>(seed(rank, turn), kTurnElements));
      c.fill(values<float>(seed(rank, turn + 1), kTurnElements));
      const Message send{(rank + 1) % ranks, a.view()}, receive{(rank + ranks - 1) % ranks, b.view()};
      Work hop = first->exchange({&send, 1}, {&receive, 1}, "hop");
      Work gather = first->all_gather(a.piece(0, kTurnElements / ranks), d.view(), "gather");
      Work sum = second->all_reduce(c.view(), "sum");
      Work* order[] = {&hop, &gather, &sum};
      std::rotate(order, order + turn % 3, order + 3);
      for (Work* work : order) work->wait();
      const std::string where = fmt::format("rank {}, turn {}", rank, turn);
      expect_values(b.read(), values<float>(seed((rank + ranks - 1) % ranks, turn), kTurnElements), where + ", hop");
      expect_values(d.read(), kinds()[1].expected(rank, ranks, turn), where + ", gather");
      expect_values(c.read(), sum_in_turn(ranks, turn + 1), where + ", sum");
    }
  });
}

// The threads go on while the GPU has not even begun.
TEST(GpuCommunicator, TheThreadDoesNotWaitForTheGpu) {
  run_gpu_ranks(2, 30, [&](int rank, World& world, Device& device) {
    const auto group = world.group(rank, {0, 1}, Dimension::cp, device);
    GpuVector x(device, 1000);
    x.fill(values<float>(rank, 1000));
    group->all_reduce(x.view(), "first use").wait();
    device.synchronize();
    group->barrier("ready");
    const Clock::time_point start = Clock::now();
    delay_compute(device, 0.3);
    for (int call = 0; call < 10; ++call) group->all_reduce(x.view(), "sum").wait();
    EXPECT_LT(seconds_since(start), 0.2);
    device.synchronize();
    EXPECT_GE(seconds_since(start), 0.3);
  });
}

TEST(GpuCommunicator, ExposedTimeIsWhatTheStreamWaits) {
  constexpr int64_t kElements = 1 << 20;
  run_gpu_ranks(2, 30, [&](int rank, World& world, Device& device) {
    const auto group = world.group(rank, {0, 1}, Dimension::cp, device);
    GpuVector out(device, kElements), in(device, kElements);
    const Message send{1 - rank, out.view()}, receive{1 - rank, in.view()};
    const auto hop = [&] { return group->exchange({&send, 1}, {&receive, 1}, "hop"); };
    hop().wait();
    device.synchronize();
    group->barrier("ready");
    group->reset_traffic();
    // Hidden behind computing.
    Work hidden = hop();
    delay_compute(device, 0.05);
    hidden.wait();
    EXPECT_LT(group->traffic().exposed_seconds, 0.02);
    device.synchronize();
    group->barrier("ready again");
    group->reset_traffic();
    // Rank 1 comes late.
    if (rank == 1) delay_compute(device, 0.05);
    hop().wait();
    if (rank == 0) {
      EXPECT_GT(group->traffic().exposed_seconds, 0.03);
    } else {
      EXPECT_LT(group->traffic().exposed_seconds, 0.02);
    }
  });
}

// 64 MiB a rank, and addresses that are not alike within 16 bytes.
TEST(GpuCommunicator, LargeAndUnalignedTensors) {
  constexpr int64_t kElements = 16 << 20;
  run_gpu_ranks(2, 30, [&](int rank, World& world, Device& device) {
    const auto group = world.group(rank, {0, 1}, Dimension::cp, device);
    GpuVector memory(device, kElements + 8);
    const std::vector<float> own = values<float>(rank, kElements);
    const std::vector<float> expected = sum_of_ranks<float>(2, kElements);
    for (const int64_t begin : {0, 1, 3 * rank}) {
      std::vector<float> filling(static_cast<size_t>(kElements + 8), -1);
      std::copy(own.begin(), own.end(), filling.begin() + begin);
      memory.fill(filling);
      group->all_reduce(memory.piece(begin, kElements), "sum").wait();
      const std::vector<float> found = memory.read();
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), found.begin() + begin)) << begin;
      EXPECT_TRUE(begin == 0 || found[0] == -1);
      EXPECT_EQ(found[static_cast<size_t>(kElements + begin)], -1);
    }
  });
}

struct Outcome {
  ErrorKind kind = ErrorKind::internal;
  std::string message;
  double seconds = 0;
};

Outcome outcome_of(int size, double timeout, const GpuRankBody& body) {
  const Clock::time_point start = Clock::now();
  try {
    run_gpu_ranks(size, timeout, body);
  } catch (const Error& error) {
    return {error.kind(), error.what(), seconds_since(start)};
  }
  return {ErrorKind::internal, "", seconds_since(start)};
}

// The making of a device and, for NCCL, of the connections counts in.
constexpr double kPromptSeconds = 15;

// Rank 1 throws with a call open, and its memory goes; the others' streams, and rank 0's thread, wait for it.
TEST(GpuFailures, ARankThrowsWithACallOpen) {
  if (several() < 2) GTEST_SKIP() << "needs 2 ranks";
  for (int late = 0; late < 2; ++late) {
    const Outcome outcome = outcome_of(several(), 60, [&](int rank, World& world, Device& device) {
      const auto group = world.group(rank, all_ranks(several()), Dimension::cp, device);
      GpuVector part(device, 1 << 20), whole(device, (1 << 20) * several());
      group->all_gather(part.view(), whole.view(), "first").wait();
      if (rank == late) delay_compute(device, 0.05);
      Work work = group->all_gather(part.view(), whole.view(), "second");
      if (rank == 1) throw DataError("byte 17 is not a token");
      work.wait();
      whole.read();
      group->all_gather(part.view(), whole.view(), "third").wait();
    });
    EXPECT_EQ(outcome.kind, ErrorKind::data);
    EXPECT_EQ(outcome.message, "rank 1: byte 17 is not a token");
    EXPECT_LT(outcome.seconds, kPromptSeconds);
  }
}

TEST(GpuFailures, ARankThatNeverComesIsNamed) {
  if (several() < 2) GTEST_SKIP() << "needs 2 ranks";
  const Outcome outcome = outcome_of(several(), 2, [&](int rank, World& world, Device& device) {
    const auto group = world.group(rank, all_ranks(several()), Dimension::cp, device);
    GpuVector x(device, 1000);
    world.set_position(rank, fmt::format("step 3, layer {} forward", rank));
    group->all_reduce(x.view(), "first").wait();
    if (rank == 1) {
      while (!world.aborted()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
    group->all_reduce(x.view(), "gradient").wait();
    x.read();
  });
  EXPECT_EQ(outcome.kind, ErrorKind::communication);
  EXPECT_THAT(outcome.message, AllOf(StartsWith("rank "), HasSubstr("all_reduce 'gradient' of 4000 bytes"),
                                     HasSubstr("waited 2 s"), HasSubstr("rank 1 has not come (at step 3, layer 1")));
  EXPECT_LT(outcome.seconds, kPromptSeconds);
}

TEST(GpuFailures, RanksThatDisagreeAreBothNamed) {
  if (several() < 2) GTEST_SKIP() << "needs 2 ranks";
  const Outcome outcome = outcome_of(2, 60, [&](int rank, World& world, Device& device) {
    const auto group = world.group(rank, {0, 1}, Dimension::cp, device);
    GpuVector x(device, 1000);
    group->all_reduce(x.view(), "first").wait();
    group->all_reduce(x.piece(0, 500 + rank), "gradient").wait();
    x.read();
  });
  EXPECT_EQ(outcome.kind, ErrorKind::communication);
  EXPECT_THAT(outcome.message, AllOf(HasSubstr("rank 0 called all_reduce of 2000 bytes of f32 'gradient'"),
                                     HasSubstr("rank 1 called all_reduce of 2004 bytes of f32 'gradient'")));
  EXPECT_LT(outcome.seconds, kPromptSeconds);
}

}  // namespace
}  // namespace farspan
