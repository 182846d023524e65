// SPDX-License-Identifier: Apache-2.0
// Profile, trace and energy of steps, from ops whose times are given.
#include <algorithm>
#include <fstream>
#include <gmock/gmock.h>
#include <nlohmann/json.hpp>
#include <thread>

#include "comm/threads/thread_world.h"
#include "observe/gather_text.h"
#include "observe/power.h"
#include "observe/step_observer.h"
#include "tests/scratch_folder.h"

namespace farspan {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

constexpr OpCost kProduct = {.op = "gemm", .op_class = OpClass::gemm, .flops = 4e12, .bytes = 1e9};
constexpr OpCost kSmallProduct = {.op = "gemm", .op_class = OpClass::gemm, .flops = 1e12, .bytes = 1e9};
constexpr OpCost kNorm = {.op = "rms_norm_forward", .op_class = OpClass::memory, .flops = 1e9, .bytes = 2e9};
constexpr OpCost kAttention = {.op = "attention_backward", .op_class = OpClass::attention, .flops = 2e12, .bytes = 1e9};
const Ceilings kCeilings = {.machine = "a machine",
                            .gemm_flops = 800e12,
                            .attention_forward_flops = 500e12,
                            .attention_backward_flops = 400e12,
                            .memory_bandwidth = 4e12};

TEST(StepProfile, SumsOpsByNameAndMeasuresThemAgainstTheirOwnCeiling) {
  StepProfile profile(kCeilings);
  for (int step = 0; step < 2; ++step) {
    profile.add(kProduct, 10e-3);
    profile.add(kSmallProduct, 2.5e-3);
    profile.add(kNorm, 1e-3);
    profile.add(kAttention, 10e-3);
    profile.add({.kind = ActivityKind::communication, .label = "layer 1 hop 0", .bytes = 1e6}, 1e-3);
    profile.add({.kind = ActivityKind::communication, .label = "layer 2 hop 0", .bytes = 1e6}, 1e-3);
    profile.end_step(30e-3);
  }
  const json read = json::parse(profile.json());
  EXPECT_EQ(read["steps"], 2);
  EXPECT_NEAR(read["seconds_per_step"], 30e-3, 1e-12);
  EXPECT_NEAR(read["outside_seconds"], 6.5e-3, 1e-12);
  ASSERT_EQ(read["ops"].size(), 3u);
  const json& gemm = read["ops"][0];  // the longest
  EXPECT_EQ(gemm["op"], "gemm");
  EXPECT_EQ(gemm["calls"], 2);
  EXPECT_NEAR(gemm["seconds"], 12.5e-3, 1e-12);
  EXPECT_NEAR(gemm["share"], 12.5 / 30, 1e-9);
  EXPECT_NEAR(gemm["of_ceiling"], 0.5, 1e-9);
  ASSERT_EQ(gemm["by_cost"].size(), 2u);
  EXPECT_NEAR(read["ops"][1]["of_ceiling"], 0.5, 1e-9);  // attention's backward
  EXPECT_NEAR(read["ops"][2]["of_ceiling"], 0.5, 1e-9);  // the norm's bytes
  ASSERT_EQ(read["activities"].size(), 1u);
  EXPECT_EQ(read["activities"][0]["bytes"], 2e6);
  const std::string table = profile.table();
  EXPECT_THAT(table, HasSubstr("2 steps of 30.000 ms"));
  EXPECT_THAT(table, HasSubstr("400 TFLOP/s"));
  EXPECT_THAT(table, HasSubstr("2000 GB/s"));
  profile.forget();
  EXPECT_EQ(json::parse(profile.json())["steps"], 0);
}

// {thread name -> events} of one rank.
std::map<std::string, std::vector<json>> by_thread(const json& trace, int rank) {
  std::map<int, std::string> names;
  std::map<std::string, std::vector<json>> events;
  for (const json& event : trace["traceEvents"]) {
    if (event["pid"] != rank) continue;
    if (event["name"] == "thread_name") names[event["tid"]] = event["args"]["name"];
    if (event["ph"] == "X") events[names.at(event["tid"])].push_back(event);
  }
  return events;
}

TEST(StepTrace, ShowsWhatOverlapsOnLanesOfItsOwn) {
  StepTrace trace;
  EXPECT_TRUE(trace.empty());
  const auto message = [&](const char* label, OpTime time) {
    trace.add({.kind = ActivityKind::communication, .label = label, .bytes = 1e6}, time);
  };
  trace.add({.label = "forward"}, {100, 10e-3});
  trace.add({.label = "load rows"}, {100, 1e-3});
  trace.add(kProduct, {100.001, 5e-3});
  message("first", {100.001, 4e-3});
  message("inside", {100.002, 1e-3});
  message("across", {100.003, 4e-3});
  const json read = json::parse(trace_file({trace.events(0, trace.begin_nanoseconds())}));
  const auto threads = by_thread(read, 0);
  ASSERT_EQ(threads.at("phases").size(), 2u);
  EXPECT_EQ(threads.at("phases")[0]["name"], "forward");
  EXPECT_NEAR(threads.at("phases")[0]["ts"], 0, 0.01);
  ASSERT_EQ(threads.at("compute").size(), 1u);
  EXPECT_NEAR(threads.at("compute")[0]["ts"], 1000, 0.01);  // microseconds
  EXPECT_NEAR(threads.at("compute")[0]["dur"], 5000, 0.01);
  EXPECT_NEAR(threads.at("compute")[0]["args"]["TFLOP/s"], 800, 1e-6);
  ASSERT_EQ(threads.at("communication").size(), 2u);
  ASSERT_EQ(threads.at("communication 2").size(), 1u);
  EXPECT_EQ(threads.at("communication 2")[0]["name"], "across");
}

TEST(GatherText, BringsEveryRanksTextToTheFirst) {
  run_thread_ranks(3, 60, [](int rank, World& world) {
    const auto group = world.group(rank, {0, 1, 2}, Dimension::world);
    const std::vector<std::string> texts = gather_text(*group, std::string(static_cast<size_t>(rank) * 1000, 'x'));
    if (rank != 0) {
      EXPECT_TRUE(texts.empty());
      return;
    }
    ASSERT_EQ(texts.size(), 3u);
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(texts[i], std::string(i * 1000, 'x'));
  });
}

TEST(StepObserver, LeavesTheFirstStepOutAndTracesTheThird) {
  const test::ScratchFolder folder;
  run_thread_ranks(2, 60, [&](int rank, World& world) {
    const auto group = world.group(rank, {0, 1}, Dimension::world);
    Device device(DeviceKind::cpu, 1);
    StepObserver observer({.profile = true, .trace = true, .ceilings = kCeilings}, device, 5, 9);
    for (int64_t step = 5; step <= 9; ++step) {
      observer.begin_step(step);
      for (int64_t op = 0; op < step; ++op)
        device.run(kNorm, [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); });
      char bytes[8] = {};
      copy_to_device(device, bytes, bytes + 4, 4);
      observer.end_step();
      device.run(kNorm, [] {});  // between steps nobody watches
    }
    observer.write(*group, folder.path());
    EXPECT_THAT(observer.profile_table(), HasSubstr("4 steps"));
  });
  const auto read = [&](const char* name) { return json::parse(std::ifstream(folder.path() + "/" + name)); };
  const json profile = read("profile.json");
  EXPECT_EQ(profile["ceilings"]["machine"], "a machine");
  ASSERT_EQ(profile["ranks"].size(), 2u);
  EXPECT_EQ(profile["ranks"][1]["steps"], 4);
  EXPECT_EQ(profile["ranks"][1]["ops"][0]["calls"], 7.5);  // of steps 6 to 9
  const json trace = read("trace.json");
  for (int rank : {0, 1}) {
    const auto threads = by_thread(trace, rank);
    ASSERT_EQ(threads.at("compute").size(), 7u);
    ASSERT_EQ(threads.at("copies").size(), 1u);
    for (const json& event : threads.at("compute")) {
      EXPECT_GE(event["dur"], 1000);
      EXPECT_GE(event["ts"], 0);
      EXPECT_LT(event["ts"], 60e6);
    }
  }
}

TEST(EnergyMeter, HasNoReadingWithoutAGpu) {
  EnergyMeter meter("");
  EXPECT_FALSE(meter.joules_since_last());
  EXPECT_FALSE(meter.reading());
}

}  // namespace
}  // namespace farspan
