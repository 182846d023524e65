// SPDX-License-Identifier: Apache-2.0
#include "memory/arena.h"

#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/philox.h"

namespace farspan {
namespace {

constexpr int64_t kMiB = 1 << 20;

Buffer take(Arena& arena, const std::string& name, int64_t bytes, Purpose purpose = Purpose::workspace) {
  return arena.take(name, DType::u8, {bytes}, purpose);
}

MemoryPlan record(const std::function<void(Arena&)>& body) {
  Device dry(DeviceKind::dry, 1);
  Arena arena(dry);
  body(arena);
  return arena.plan();
}

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const InternalError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

// A program with overlapping lifetimes, some resident buffers, and a second program that is smaller.
void sample_run(Arena& arena) {
  const Buffer weights = take(arena, "weights", 3 * kMiB, Purpose::weights);
  {
    const ProgramScope program(arena, "train");
    Buffer kept = take(arena, "kept", kMiB, Purpose::kept);
    {
      const Buffer scratch = take(arena, "scratch", 2 * kMiB);
      const Buffer small = take(arena, "small", 100);
    }
    const Buffer later = take(arena, "later", 2 * kMiB, Purpose::communication);
    kept.release();
    const Buffer last = take(arena, "last", kMiB);
  }
  const ProgramScope program(arena, "evaluate");
  const Buffer one = take(arena, "one", kMiB);
}

TEST(Arena, PlanCountsLiveBytesByPurposeAndReusesSpace) {
  const MemoryPlan plan = record(sample_run);
  EXPECT_EQ(plan.peak_program, "train");
  EXPECT_EQ(plan.peak_bytes, 3 * kMiB + kMiB + 2 * kMiB + 100);
  EXPECT_EQ(plan.by_purpose[static_cast<size_t>(Purpose::weights)], 3 * kMiB);
  EXPECT_EQ(plan.by_purpose[static_cast<size_t>(Purpose::kept)], kMiB);
  EXPECT_EQ(plan.largest_by_purpose[static_cast<size_t>(Purpose::communication)], 2 * kMiB);
}

TEST(Arena, ReplayReachesExactlyThePlannedPeakAndIsRepeatable) {
  const MemoryPlan plan = record(sample_run);
  Device cpu(DeviceKind::cpu, 1);
  Arena arena(cpu, plan);
  sample_run(arena);
  EXPECT_EQ(arena.highest_byte(), plan.peak_bytes);
  for (int i = 0; i < 3; ++i) {
    const ProgramScope program(arena, "evaluate");
    const Buffer one = take(arena, "one", kMiB);
  }
  EXPECT_EQ(arena.highest_byte(), plan.peak_bytes);
}

TEST(Arena, LiveBuffersNeverOverlap) {
  // A random program: the layout must keep apart whatever is alive together, and stay near the bound no layout can
  // beat.
  const Philox random(7, "arena");
  const auto program = [&](Arena& arena) {
    const ProgramScope scope(arena, "random");
    std::vector<Buffer> live;
    for (uint64_t i = 0; i < 400; ++i) {
      if (!live.empty() && random.uniform(2 * i) < 0.45) {
        const size_t victim = static_cast<size_t>(random.uniform(2 * i + 1) * static_cast<double>(live.size()));
        std::swap(live[victim], live.back());
        live.pop_back();
      } else {
        live.push_back(
            take(arena, fmt::format("b{}", i), 1 + static_cast<int64_t>(random.uniform(2 * i + 1) * 100000)));
      }
    }
    while (!live.empty()) live.pop_back();
  };
  const MemoryPlan plan = record(program);
  const PlannedProgram& planned = plan.programs.front();
  std::vector<bool> alive(planned.buffers.size());
  for (const ArenaEvent event : planned.events) {
    const PlannedBuffer& now = planned.buffers[static_cast<size_t>(event.buffer)];
    if (!event.release) {
      EXPECT_EQ(now.offset % kArenaAlignment, 0);
      for (size_t other = 0; other < alive.size(); ++other) {
        const PlannedBuffer& b = planned.buffers[other];
        const bool apart = b.offset + b.bytes <= now.offset || now.offset + now.bytes <= b.offset;
        EXPECT_TRUE(!alive[other] || apart) << now.name << " " << b.name;
      }
    }
    alive[static_cast<size_t>(event.buffer)] = !event.release;
  }
  EXPECT_LE(planned.end, planned.live_peak + planned.live_peak / 10);
}

TEST(Arena, DepartureFromThePlanNamesTheBuffer) {
  const MemoryPlan plan = record(sample_run);
  Device cpu(DeviceKind::cpu, 1);
  const auto replay = [&](const std::function<void(Arena&)>& body) {
    Arena arena(cpu, plan);
    const Buffer weights = take(arena, "weights", 3 * kMiB, Purpose::weights);
    return message_of([&] {
      const ProgramScope program(arena, "train");
      body(arena);
    });
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(replay([](Arena& arena) { const Buffer b = take(arena, "other", kMiB, Purpose::kept); }),
              HasSubstr("other"));
  EXPECT_THAT(replay([](Arena& arena) { const Buffer b = take(arena, "kept", kMiB + 1, Purpose::kept); }),
              HasSubstr("1048577"));
  EXPECT_THAT(replay([](Arena& arena) {
                const Buffer kept = take(arena, "kept", kMiB, Purpose::kept);
                Buffer scratch = take(arena, "scratch", 2 * kMiB);
                scratch.release();
                const Buffer small = take(arena, "small", 100);
              }),
              HasSubstr("releases scratch where the plan does not"));
  EXPECT_THAT(replay([](Arena&) {}), HasSubstr("the next would be kept"));
}

TEST(Arena, UnplannedProgramAndUnreleasedBufferAreErrors) {
  const MemoryPlan plan = record(sample_run);
  Device cpu(DeviceKind::cpu, 1);
  Arena arena(cpu, plan);
  EXPECT_THAT(message_of([&] { arena.begin_program("surprise"); }), ::testing::HasSubstr("surprise"));
  EXPECT_THAT(message_of([&] {
                record([](Arena& recorded) {
                  recorded.begin_program("train");
                  const Buffer b = take(recorded, "leaked", 1);
                  recorded.end_program();
                });
              }),
              ::testing::HasSubstr("1 buffers not released"));
}

TEST(Arena, AMemoryPlanPastTheAddressSpaceIsAnErrorNotACrash) {
  MemoryPlan plan;
  plan.peak_bytes = int64_t{1} << 60;
  Device cpu(DeviceKind::cpu, 1);
  EXPECT_THROW(Arena(cpu, plan), MemoryError);
}

}  // namespace
}  // namespace farspan
