// SPDX-License-Identifier: Apache-2.0
// Thread ranks that share the GPUs of this machine, all of them GPU 0 where there is one: the cases of every backend
// with tensors on the GPU, and those of late streams. Skipped without a GPU.
#include <cstdio>
#include <cstdlib>

#include "tests/ranks/gpu_communicator_cases.h"

namespace farspan {

GpuBackend tested_backend() { return GpuBackend::copies; }

int largest_world() { return cuda_device_count() == 0 ? 0 : 8; }

void run_world(int size, const RankBody& body) {
  constexpr double kTimeout = 30;
  run_gpu_ranks(size, kTimeout, [&](int rank, World& world, Device& device) {
    StagedWorld staged(world, device);
    body(rank, staged);
  });
}

namespace {

// A kernel that fails leaves every rank's GPU unusable, and all of them say so. Among processes of their own: nothing
// works on this one's GPU afterwards.
TEST(GpuFailuresDeathTest, AFailureOnTheGpuReachesEveryRank) {
  if (largest_world() == 0) GTEST_SKIP() << "needs a GPU";
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto fail = [] {
    std::atomic<int> failed = 0;
    const Outcome outcome = outcome_of(4, 20, [&](int rank, World& world, Device& device) {
      const auto group = world.group(rank, all_ranks(4), Dimension::cp, device);
      GpuVector good(device, 4000), part(device, 1000);
      const Tensor nowhere(reinterpret_cast<void*>(uintptr_t{16}), DType::f32, {4000});
      try {
        for (int turn = 0; turn < 1000; ++turn) {
          group->reduce_scatter(rank == 2 && turn == 3 ? nowhere : good.view(), part.view(), "sum").wait();
          if (turn % 10 == 9) part.read();
        }
      } catch (const Error&) {
        ++failed;
        throw;
      }
    });
    fmt::print(stderr, "{} ranks failed: {}\n", failed.load(), outcome.message);
    std::fflush(stderr);
    std::_Exit(outcome.seconds < kPromptSeconds ? static_cast<int>(outcome.kind) : 99);
  };
  EXPECT_EXIT(fail(), testing::ExitedWithCode(static_cast<int>(ErrorKind::internal)),
              "4 ranks failed: rank .: CUDA: an illegal memory access");
}

}  // namespace
}  // namespace farspan
