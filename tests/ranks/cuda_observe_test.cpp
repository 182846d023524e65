// SPDX-License-Identifier: Apache-2.0
// Profile and trace of what a GPU runs, against delays of known length on its streams, and the GPU's meter. Skipped
// without a GPU.
#include <chrono>
#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include "comm/cuda/delay.h"
#include "comm/threads/thread_world.h"
#include "observe/power.h"
#include "observe/step_observer.h"
#include "tests/scratch_folder.h"

namespace farspan {
namespace {

using nlohmann::json;

constexpr OpCost kLong = {.op = "long", .op_class = OpClass::gemm, .flops = 1e12, .bytes = 1e6};
constexpr OpCost kShort = {.op = "short", .op_class = OpClass::memory, .flops = 0, .bytes = 1e9};
constexpr int64_t kCopied = int64_t{32} << 20;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

class Watcher : public OpObserver {
 public:
  struct Seen {
    std::string name;
    OpTime time;
  };
  void on_op(const OpCost& cost, OpTime time) override { seen.push_back({std::string(cost.op), time}); }
  void on_activity(const Activity& activity, OpTime time) override {
    seen.push_back({std::string(activity.label), time});
  }
  std::vector<Seen> seen;
};

TEST(GpuObservation, TimesOpsAndCopiesWhereTheGpuRunsThem) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "needs a GPU";
  Device device(DeviceKind::cuda, 1);
  const DeviceMemory memory(device, kCopied);
  const std::vector<std::byte> source(kCopied);
  Watcher watcher;
  for (int turn = 0; turn < 2; ++turn) {
    watcher.seen.clear();
    device.observe(&watcher);
    const double begin = now();
    device.run_observed({.label = "phase"}, [&] {
      device.run(kLong, [&] { delay_compute(device, 20e-3); });
      device.run(kShort, [&] { delay_compute(device, 5e-3); });
    });
    EXPECT_LT(now() - begin, 15e-3);  // queued, not waited for
    copy_to_device(device, source.data(), memory.data(), kCopied);
    device.report_timings();
    const double end = now();
    device.observe(nullptr);
    ASSERT_EQ(watcher.seen.size(), 4u);  // by their ends in the queue
    const auto& [first, second, phase, copy] =
        std::tie(watcher.seen[0], watcher.seen[1], watcher.seen[2], watcher.seen[3]);
    EXPECT_EQ(first.name, "long");
    EXPECT_EQ(phase.name, "phase");
    EXPECT_EQ(copy.name, "to device");
    EXPECT_NEAR(first.time.seconds, 20e-3, 1e-3);
    EXPECT_NEAR(second.time.seconds, 5e-3, 1e-3);
    EXPECT_NEAR(phase.time.seconds, 25e-3, 2e-3);
    EXPECT_GE(first.time.begin, begin);
    EXPECT_GE(second.time.begin, first.time.begin + first.time.seconds - 1e-5);
    EXPECT_GE(copy.time.begin, second.time.begin + second.time.seconds - 1e-5);
    EXPECT_LE(copy.time.begin + copy.time.seconds, end + 1e-4);
    std::printf("copy of %lld bytes: %.1f GB/s\n", static_cast<long long>(kCopied), kCopied / copy.time.seconds / 1e9);
  }
}

TEST(GpuObservation, CostsLittle) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "needs a GPU";
  Device device(DeviceKind::cuda, 1);
  const auto microseconds_an_op = [&] {
    constexpr int kOps = 5000;
    device.synchronize();
    const double begin = now();
    for (int i = 0; i < kOps; ++i) device.run(kShort, [&] { delay_compute(device, 0); });
    device.synchronize();
    return (now() - begin) / kOps * 1e6;
  };
  microseconds_an_op();
  const double alone = microseconds_an_op();
  Watcher watcher;
  device.observe(&watcher);
  microseconds_an_op();  // makes the events
  device.report_timings();
  const double watched = microseconds_an_op();
  const double before = now();
  device.report_timings();
  std::printf("%.2f us an op, %.2f watched; %.2f to report each\n", alone, watched, (now() - before) / 5000 * 1e6);
  device.observe(nullptr);
  EXPECT_LT(watched, alone + 10);
}

// Rank 1 computes 30 ms longer before its message, for which rank 0's computing waits.
TEST(GpuObservation, ShowsMessagesAndWhoWaitsForThem) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "needs a GPU";
  const test::ScratchFolder folder;
  run_thread_ranks(2, 30, [&](int rank, World& world) {
    Device device(DeviceKind::cuda, 1);
    const auto everyone = world.group(rank, {0, 1}, Dimension::world);
    const auto group = world.group(rank, {0, 1}, Dimension::cp, device);
    const DeviceMemory part(device, kCopied), whole(device, 2 * kCopied);
    StepObserver observer({.profile = true, .trace = true, .ceilings = {}}, device, 1, 3);
    for (int64_t step = 1; step <= 3; ++step) {
      everyone->barrier("step");
      observer.begin_step(step);
      device.run(kLong, [&] { delay_compute(device, rank == 0 ? 5e-3 : 35e-3); });
      Work work = group->all_gather(Tensor(part.data(), DType::u8, {kCopied}),
                                    Tensor(whole.data(), DType::u8, {2 * kCopied}), "a piece");
      device.run(kShort, [&] { delay_compute(device, 1e-3); });
      work.wait();
      observer.end_step();
    }
    observer.write(*everyone, folder.path());
    if (rank == 0) std::printf("%s\n", observer.profile_table().c_str());
  });
  const json trace = json::parse(folder.read("trace.json"));
  std::map<std::string, std::vector<json>> events;  // of rank 0
  for (const json& event : trace["traceEvents"])
    if (event["ph"] == "X" && event["pid"] == 0) events[event["name"]].push_back(event);
  ASSERT_EQ(events["wait: a piece"].size(), 1u);
  const json& wait = events["wait: a piece"].front();
  EXPECT_GT(wait["dur"], 10e3);
  ASSERT_FALSE(events["a piece"].empty());
  const json& message = events["a piece"].back();
  EXPECT_GT(message["args"]["GB/s"], 20);
  const auto end_of = [](const json& event) { return event["ts"].get<double>() + event["dur"].get<double>(); };
  EXPECT_GT(end_of(message), 30e3);
  EXPECT_NEAR(end_of(message), end_of(wait), 500);
  for (const auto& [name, named] : events)
    for (const json& event : named)
      std::printf("%-16s thread %d at %.1f us for %.1f us\n", name.c_str(), event["tid"].get<int>(),
                  event["ts"].get<double>(), event["dur"].get<double>());
}

TEST(GpuEnergyMeter, CountsWhatTheGpuTakes) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "needs a GPU";
  Device device(DeviceKind::cuda, 1);
  EnergyMeter meter(cuda_bus_id(0));
  if (!meter.joules_since_last()) GTEST_SKIP() << "the driver gives no energy";
  const double begin = now();
  delay_compute(device, 1);
  device.synchronize();
  const double seconds = now() - begin;
  const double watts = *meter.joules_since_last() / seconds;
  const PowerReading reading = meter.reading().value();
  std::printf("%s at %s: %.1f W by energy, %.1f W read, %.0f MHz\n", cuda_device_name(0).c_str(),
              cuda_bus_id(0).c_str(), watts, reading.watts, reading.sm_clock / 1e6);
  EXPECT_GT(watts, 10);
  EXPECT_LT(watts, 1500);
}

}  // namespace
}  // namespace farspan
