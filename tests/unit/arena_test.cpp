// SPDX-License-Identifier: Apache-2.0
#include "memory/arena.h"

#include <algorithm>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <numeric>
#include <utility>
#include <vector>

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

// The rules themselves, buffer against buffer: largest or longest-lived first, each as low as it meets nothing alive at
// the same time; `stacked` around what is alive when the last buffer is taken, from `top` down.
enum class First { largest, longest_lived };

struct LaidOut {
  std::vector<int64_t> offsets;
  int64_t end = 0;
};

LaidOut by_rule(const PlannedProgram& program, First first, bool stacked, int64_t top) {
  const size_t count = program.buffers.size();
  std::vector<size_t> begin(count), end(count), order(count);
  for (size_t i = 0; i < program.events.size(); ++i)
    (program.events[i].release ? end : begin)[static_cast<size_t>(program.events[i].buffer)] = i;
  std::iota(order.begin(), order.end(), size_t{0});
  const auto bytes = [&](size_t i) { return program.buffers[i].bytes; };
  const auto padded = [&](int64_t n) { return (n + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment; };
  const auto last = [&](size_t i) { return stacked && end[i] > begin.back(); };
  const auto length = [&](size_t i) { return first == First::longest_lived ? end[i] - begin[i] : 0; };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    if (last(a) || last(b)) return last(a) && !last(b);
    return std::pair(length(a), bytes(a)) > std::pair(length(b), bytes(b));
  });
  LaidOut result = {.offsets = std::vector<int64_t>(count, 0), .end = 0};
  for (size_t i = 0; i < count; ++i) {
    const size_t now = order[i];
    int64_t& offset = result.offsets[now];
    std::vector<std::pair<int64_t, int64_t>> taken;  // from, to
    for (size_t j = 0; j < i; ++j)
      if (begin[order[j]] < end[now] && begin[now] < end[order[j]])
        taken.emplace_back(result.offsets[order[j]], result.offsets[order[j]] + bytes(order[j]));
    std::sort(taken.begin(), taken.end());
    for (const auto& [from, to] : taken) {
      if (last(now) || from >= offset + bytes(now)) break;
      offset = std::max(offset, padded(to));
    }
    if (last(now)) offset = top -= padded(bytes(now));
    result.end = std::max(result.end, offset + bytes(now));
  }
  return result;
}

std::vector<int64_t> offsets_by_the_rules(const PlannedProgram& program) {
  int64_t live = 0, most = 0;
  for (const ArenaEvent event : program.events) {
    const int64_t bytes = program.buffers[static_cast<size_t>(event.buffer)].bytes;
    live += (event.release ? -1 : 1) * ((bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment);
    most = std::max(most, live);
  }
  LaidOut best = by_rule(program, First::largest, false, 0);
  for (First first : {First::longest_lived, First::largest}) {
    if (best.end <= most + most / 1000) break;
    LaidOut stacked = by_rule(program, first, true, most);
    if (stacked.end < best.end) best = std::move(stacked);
  }
  return best.offsets;
}

std::vector<int64_t> offsets_of(const PlannedProgram& program) {
  std::vector<int64_t> offsets;
  for (const PlannedBuffer& buffer : program.buffers) offsets.push_back(buffer.offset);
  return offsets;
}

TEST(Arena, LayoutIsTheLowestFitByTheRules) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    const Philox random(seed, "lowest fit");
    // Few sizes, as in a model, or many; buffers that live long, or short; some without a byte.
    const int64_t sizes = seed % 2 == 0 ? 5 : 5000;
    const double taken_share = seed % 4 < 2 ? 0.52 : 0.7;
    const MemoryPlan plan = record([&](Arena& arena) {
      const ProgramScope scope(arena, "random");
      std::vector<Buffer> live;
      for (uint64_t i = 0; i < 1500; ++i) {
        if (!live.empty() && random.uniform(3 * i) > taken_share) {
          // The newest half of the time, so that some buffers stay for long.
          const double place = random.uniform(3 * i + 1) < 0.5 ? 0.999999 : random.uniform(3 * i + 2);
          std::swap(live[static_cast<size_t>(place * static_cast<double>(live.size()))], live.back());
          live.pop_back();
        } else {
          const int64_t step = static_cast<int64_t>(random.uniform(3 * i + 1) * static_cast<double>(sizes));
          live.push_back(take(arena, "b", step * (100000 / sizes)));
        }
      }
      while (!live.empty()) live.pop_back();
    });
    EXPECT_EQ(offsets_of(plan.programs.front()), offsets_by_the_rules(plan.programs.front()));
  }
}

// A forward that keeps and a backward that gives back, layer by layer, each with workspace of its own.
void run_layers(Arena& arena, int layers) {
  const ProgramScope scope(arena, "train");
  std::vector<Buffer> kept;
  const auto work = [&] { const Buffer workspace = take(arena, "workspace", 5000); };
  for (int layer = 0; layer < layers; ++layer) {
    kept.push_back(take(arena, "stream", 4096, Purpose::kept));
    kept.push_back(take(arena, "gates", 7000, Purpose::kept));
    work();
  }
  while (!kept.empty()) {
    work();
    kept.pop_back();
  }
}

TEST(Arena, LayoutOfManyLayersFollowsTheRule) {
  const MemoryPlan plan = record([](Arena& arena) { run_layers(arena, 300); });
  EXPECT_EQ(offsets_of(plan.programs.front()), offsets_by_the_rules(plan.programs.front()));
}

// The same, but that backward leaves a gradient for each layer, none of whose sizes divides what the layer kept.
TEST(Arena, GradientsLieWhereLaterLayersKept) {
  for (int64_t gradient_bytes : {int64_t{3000}, 9 * kMiB / 1024, int64_t{13000}, int64_t{40000}}) {
    SCOPED_TRACE(gradient_bytes);
    const MemoryPlan plan = record([&](Arena& arena) {
      const ProgramScope scope(arena, "train");
      std::vector<Buffer> kept, gradients;
      const auto work = [&] { const Buffer workspace = take(arena, "workspace", 50000); };
      for (int layer = 0; layer < 30; ++layer) {
        kept.push_back(take(arena, "stream", 4096, Purpose::kept));
        kept.push_back(take(arena, "gates", 7000, Purpose::kept));
        work();
      }
      while (!kept.empty()) {
        gradients.push_back(take(arena, "gradient", gradient_bytes, Purpose::gradients));
        work();
        kept.pop_back();
        kept.pop_back();
      }
    });
    const PlannedProgram& program = plan.programs.front();
    EXPECT_EQ(offsets_of(program), offsets_by_the_rules(program));
    EXPECT_LE(program.end, program.live_peak + program.live_peak / 50);
  }
}

// Compared buffer by buffer, 100000 layers would take hours.
TEST(Arena, LayoutOfHundredThousandLayersEnds) {
  const MemoryPlan plan = record([](Arena& arena) { run_layers(arena, 100000); });
  EXPECT_EQ(plan.peak_bytes, plan.programs.front().end);
  EXPECT_GE(plan.peak_bytes, int64_t{100000} * (4096 + 7000));
}

TEST(Arena, RecordingsAreTheSameUpToEachBuffer) {
  const auto recording = [](int layers, int64_t last_bytes, Purpose last_purpose) {
    Device dry(DeviceKind::dry, 1);
    Arena arena(dry);
    run_layers(arena, layers);
    {
      const ProgramScope scope(arena, "evaluate");
      const Buffer last = take(arena, "last", last_bytes, last_purpose);
    }
    return arena.recorded();
  };
  const MemoryPlan one = recording(3, 10, Purpose::workspace);
  EXPECT_TRUE(same_recording(one, recording(3, 10, Purpose::workspace)));
  EXPECT_FALSE(same_recording(one, recording(4, 10, Purpose::workspace)));
  EXPECT_FALSE(same_recording(one, recording(3, 11, Purpose::workspace)));
  EXPECT_FALSE(same_recording(one, recording(3, 10, Purpose::kept)));
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
