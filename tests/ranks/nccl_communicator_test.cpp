// SPDX-License-Identifier: Apache-2.0
// Thread ranks with a GPU each and NCCL between them: the cases of every backend and those of late streams, in worlds
// of as many ranks as there are GPUs. Skipped where there is one GPU, or no NCCL.
#include "comm/nccl/nccl_communicator.h"

#include "tests/ranks/gpu_communicator_cases.h"

namespace farspan {

GpuBackend tested_backend() { return GpuBackend::nccl; }

int largest_world() {
  const int count = cuda_device_count();
  return count < 2 || !nccl_absence().empty() ? 0 : std::min(count, 8);
}

void run_world(int size, const RankBody& body) {
  constexpr double kTimeout = 30;
  run_gpu_ranks(size, kTimeout, [&](int rank, World& world, Device& device) {
    StagedWorld staged(world, device);
    body(rank, staged);
  });
}

namespace {

// Both threads have made the call, so they do not miss each other; but rank 1's GPU does not come to it in time.
TEST(GpuFailures, AGpuThatIsLateIsFoundByTheWatchdog) {
  if (largest_world() < 2) GTEST_SKIP() << "needs 2 GPUs";
  const Outcome outcome = outcome_of(2, 1, [&](int rank, World& world, Device& device) {
    const auto group = world.group(rank, {0, 1}, Dimension::cp, device);
    GpuVector x(device, 1000);
    group->all_reduce(x.view(), "first").wait();
    if (rank == 1) delay_compute(device, 4);
    group->all_reduce(x.view(), "gradient").wait();
    if (rank == 0) x.read();  // held up by the GPU until the watchdog has acted
    group->all_reduce(x.view(), "next").wait();
  });
  EXPECT_EQ(outcome.kind, ErrorKind::communication);
  EXPECT_THAT(outcome.message,
              AllOf(StartsWith("rank 0: all_reduce 'gradient' of 4000 bytes, call 2 of cp group [0, 1]"),
                    HasSubstr("has waited 1 s")));
  EXPECT_LT(outcome.seconds, kPromptSeconds);
}

// All that NCCL is asked for, by one rank to itself: what one GPU can show.
TEST(NcclCommunicator, ALoneRank) {
  if (cuda_device_count() == 0 || !nccl_absence().empty()) GTEST_SKIP() << "needs a GPU and NCCL";
  for (const bool throws : {false, true}) {
    const auto run = [&] {
      run_thread_ranks(1, 30, [&](int, World& world) {
        Device device(DeviceKind::cuda, 1, 0);
        auto* host = dynamic_cast<CallCommunicator*>(world.group(0, {0}, Dimension::cp).release());
        const auto group = make_nccl_communicator(std::unique_ptr<CallCommunicator>(host), world, device, 30);
        GpuVector x(device, 1000), y(device, 1000);
        group->register_memory(x.view().raw(), x.view().bytes());
        for (int turn = 0; turn < 50; ++turn) {
          const std::vector<float> expected = values<float>(turn, 1000);
          x.fill(expected);
          group->all_reduce(x.view(), "sum").wait();
          group->all_gather(x.view(), y.view(), "gather").wait();
          group->reduce_scatter(y.view(), x.view(), "scatter").wait();
          group->all_to_all(x.view(), y.view(), "transpose").wait();
          const Message send{0, y.view()}, receive{0, x.view()};
          Work hop = group->exchange({&send, 1}, {&receive, 1}, "hop");
          if (throws && turn == 49) throw DataError("bad row");
          hop.wait();
          EXPECT_TRUE(same_bits(x.read(), expected)) << turn;
        }
        group->barrier("end");
        EXPECT_EQ(group->traffic().calls, 251);
      });
    };
    if (throws)
      EXPECT_THROW(run(), DataError);
    else
      run();
  }
}

TEST(GpuFailures, RanksThatShareAGpuAreRefused) {
  if (cuda_device_count() == 0 || !nccl_absence().empty()) GTEST_SKIP() << "needs a GPU and NCCL";
  std::string message;
  try {
    run_thread_ranks(
        2, 30,
        [](int rank, World& world) {
          Device device(DeviceKind::cuda, 1, 0);
          world.group(rank, {0, 1}, Dimension::cp, device);
        },
        10, GpuBackend::nccl);
  } catch (const ConfigError& error) {
    message = error.what();
  }
  EXPECT_THAT(message, HasSubstr("communication.backend nccl: ranks 0 and 1 of the cp group [0, 1] have the same GPU"));
}

}  // namespace
}  // namespace farspan
