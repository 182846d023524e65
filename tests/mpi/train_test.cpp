// SPDX-License-Identifier: Apache-2.0
// The program under mpirun: the same numbers as with thread ranks, one voice, an orderly stop, and an end within
// seconds when a process dies; on one machine, and on two network namespaces that stand for two.
#include <csignal>
#include <gmock/gmock.h>
#include <regex>

#include "tests/end_to_end/program.h"
#include "tests/mpi/launched.h"

namespace farspan {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr const char* kConfig =
    "model:\n  num_layers: 2\n  hidden_size: 32\n  num_attention_heads: 4\n  num_query_groups: 2\n  ffn_hidden_size: "
    "64\n"
    "data:\n  seq_length: 48\n  split: \"80,20\"\n"
    "training:\n  train_iters: 5\n  global_batch_size: 4\n  eval_iters: 2\n"
    "optimizer:\n  lr: 5.0e-3\n  lr_decay_iters: 5\n";

std::string program() {
  const char* path = std::getenv("FARSPAN_PROGRAM");
  return path == nullptr ? "farspan" : path;
}

size_t occurrences(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

class MpiTrain : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const auto& [name, length] : {std::pair{"a", 700}, {"b", 333}, {"c", 41}}) {
      std::string text;
      for (int i = 0; i < length; ++i) text += static_cast<char>('a' + (i * i + i / 7) % 26);
      folder_.write(std::string("texts/") + name, text);
    }
    folder_.write("small.yaml", kConfig);
  }
  std::string command(const std::string& name, const std::string& flags) const {
    return fmt::format("{} {} --path {} {}", name, folder_.path("small.yaml"), folder_.path("texts"), flags);
  }
  std::string output(const std::string& name) const { return "--output " + folder_.path(name); }
  std::string metrics(const std::string& name) const { return folder_.read(name + "/metrics.jsonl"); }
  // Waits until the run has written as many lines of metrics.
  bool reaches(const std::string& name, size_t lines) const {
    for (int turn = 0; turn < 1000 && occurrences(metrics(name), "\n") < lines; ++turn)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return occurrences(metrics(name), "\n") >= lines;
  }

  test::ScratchFolder folder_;
};

// Metrics without the figures that depend on the clock.
std::string without_times(const std::string& metrics) {
  static const std::regex times("\"(seconds|tokens_per_second|model_tflops|.._exposed_seconds)\":[^,}]*");
  return std::regex_replace(metrics, times, "\"$1\":0");
}

TEST_F(MpiTrain, ProcessesGiveTheSameBitsAsThreads) {
  const std::vector<std::pair<int, std::string>> layouts = {
      {4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"},
      {4, "--context-parallel-size 2 --cp-comm-type a2a --zero-stage 3"},
      {3, "--context-parallel-size 3 --cp-comm-type all_gather"},
      {2, "--context-parallel-size 1 --precision bf16"}};
  for (const auto& [ranks, layout] : layouts) {
    const ProgramResult threads =
        run_program(command("train", fmt::format("--ranks {} {} {}", ranks, layout, output("threads"))));
    ASSERT_EQ(threads.status, 0) << threads.err;
    Launched processes(
        fmt::format("-n {} {} {}", ranks, program(), command("train", layout + " " + output("processes"))));
    ASSERT_EQ(processes.wait(), 0) << processes.err();
    EXPECT_EQ(without_times(metrics("processes")), without_times(metrics("threads"))) << processes.command();
    EXPECT_EQ(folder_.read("processes/checkpoints/step_5/weights.safetensors"),
              folder_.read("threads/checkpoints/step_5/weights.safetensors"));
    // Only rank 0 speaks: no line that thread ranks do not write, and none twice.
    EXPECT_EQ(occurrences(processes.out(), "\nstep "), 5u) << processes.out();
    EXPECT_EQ(occurrences(processes.out(), "held out after step"), 1u);
    EXPECT_EQ(occurrences(processes.err(), "\n"), occurrences(threads.err, "\n")) << processes.err();
  }
}

TEST_F(MpiTrain, EvaluationGivesTheSameLine) {
  ASSERT_EQ(run_program(command("train", output("run"))).status, 0);
  const std::string load = "--load " + folder_.path("run");
  const ProgramResult threads = run_program(command("eval", load + " --ranks 2"));
  Launched processes(fmt::format("-n 2 {} {}", program(), command("eval", load)));
  EXPECT_EQ(processes.wait(), 0) << processes.err();
  EXPECT_THAT(threads.out, HasSubstr("perplexity"));
  EXPECT_EQ(processes.out(), threads.out);
}

TEST_F(MpiTrain, AProcessThatIsKilledEndsTheRunWithItsName) {
  Launched run(fmt::format("-n 4 {} {}", program(),
                           command("train", "--context-parallel-size 2 --train-iters 1000000 " + output("run"))));
  ASSERT_TRUE(reaches("run", 3)) << run.err();
  const pid_t victim = run.process_of_rank(2);
  const auto start = Launched::Clock::now();
  kill(victim, SIGKILL);
  EXPECT_NE(run.wait(), 0);
  EXPECT_LT(run.seconds_until_gone(10), 10);
  EXPECT_LT(std::chrono::duration<double>(Launched::Clock::now() - start).count(), 10);
  EXPECT_THAT(run.last_line(), AllOf(StartsWith(fmt::format("farspan: error: rank 2: process {} on host ", victim)),
                                     HasSubstr("it was killed or has crashed")));
  EXPECT_THAT(run.err(), HasSubstr("farspan: rank 0 at step "));
}

TEST_F(MpiTrain, ASignalToAnyRankStopsAllAtTheSameStep) {
  Launched run(fmt::format("-n 3 {} {}", program(),
                           command("train", "--context-parallel-size 3 --train-iters 1000000 " + output("run"))));
  ASSERT_TRUE(reaches("run", 3)) << run.err();
  kill(run.process_of_rank(2), SIGTERM);
  EXPECT_EQ(run.wait(), 128 + SIGTERM) << run.err();
  EXPECT_EQ(run.last_line().find("farspan: error"), std::string::npos) << run.err();
  const std::string text = metrics("run");
  const std::string last = text.substr(text.rfind("\n", text.size() - 2) + 1);
  std::smatch step;
  ASSERT_TRUE(std::regex_search(last, step, std::regex("\"step\":([0-9]+)"))) << last;
  EXPECT_TRUE(std::filesystem::exists(folder_.path("run/checkpoints/step_" + step[1].str() + "/index.json")));
}

// An evaluation of many rows, under both kinds of ranks: all leave it at the same batch.
TEST_F(MpiTrain, ASignalEndsAnEvaluation) {
  std::string text;
  for (int i = 0; i < 3'000'000; ++i) text += static_cast<char>('a' + (i * 7 + i / 11) % 26);
  folder_.write("texts/long", text);
  for (const auto& [launcher, ranks] : {std::pair{mpirun() + " -n 2 ", ""}, {std::string(), "--ranks 2 "}}) {
    Launched run(fmt::format("{} {}", program(),
                             command("train", fmt::format("--context-parallel-size 2 --split 1,99 --eval-iters 1000000 "
                                                          "--train-iters 1 {}{}",
                                                          ranks, output("run")))),
                 launcher);
    ASSERT_TRUE(reaches("run", 1)) << run.err();
    for (int turn = 0; turn < 500 && run.out().find("saved") == std::string::npos; ++turn)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    kill(launcher.empty() ? run.launcher() : run.process_of_rank(1), SIGTERM);
    EXPECT_EQ(run.wait(), 128 + SIGTERM) << run.err();
    EXPECT_LT(run.seconds(), 20);
    EXPECT_THAT(run.out(), HasSubstr("evaluation after step 1 stopped"));
    EXPECT_EQ(occurrences(metrics("run"), "\"kind\":\"eval\""), 0u);
  }
}

// One process that takes itself for the whole job, of a launcher that started two; and two such at once.
TEST_F(MpiTrain, B114_LauncherAndLibraryMustAgreeOnTheWorld) {
  const auto expect_refused = [&](const ProgramResult& result) {
    EXPECT_EQ(result.status, 2) << result.err;
    EXPECT_THAT(result.last_error_line(), AllOf(StartsWith("farspan: error: mpirun started 2 processes"),
                                                HasSubstr("(OMPI_COMM_WORLD_SIZE=2)"), HasSubstr("a world of 1")));
  };
  const auto one = [&] { return run_program(command("train", output("run")), "OMPI_COMM_WORLD_SIZE=2"); };
  expect_refused(one());
  ProgramResult other;
  std::thread beside([&] { other = one(); });
  expect_refused(one());
  beside.join();
  expect_refused(other);
  EXPECT_FALSE(std::filesystem::exists(folder_.path("run")));
}

TEST_F(MpiTrain, ProcessesWithOtherSettingsOrOtherDataAreRefused) {
  folder_.write("others/a", std::string(1200, 'x'));
  const std::string train = command("train", output("run"));
  for (const auto& [more, status, message] :
       {std::tuple{std::string("--lr 0.5"), 2, "optimizer.lr is 0.005 on rank 0 and 0.5 on rank 1"},
        {std::string("--train-iters 2"), 2, "training.train_iters is 5 on rank 0 and 2 on rank 1"},
        {"--path " + folder_.path("others"), 2, "data.path is "}}) {
    Launched run(fmt::format("-n 1 {0} {1} : -n 1 {0} {1} {2}", program(), train, more));
    EXPECT_EQ(run.wait(), status) << run.err();
    EXPECT_THAT(run.last_line(), AllOf(StartsWith("farspan: error: "), HasSubstr(message)));
  }
}

TEST_F(MpiTrain, WhatIsWrongInEveryProcessIsSaidOnce) {
  for (const auto& [flags, status, message] :
       {std::tuple{"--hidden-size 31", 2, "hidden_size 31"},
        {"--no-such-key 1", 2, "no-such-key"},
        {"--ranks 5", 2, "--ranks 5, but mpirun started 2 processes"},
        {"--backend threads", 2, "communication.backend threads has all ranks in one process"},
        {"--load nowhere", 3, "no complete checkpoint in nowhere"}}) {
    Launched run(fmt::format("-n 2 {} {}", program(), command("train", std::string(flags) + " " + output("run"))));
    EXPECT_EQ(run.wait(), status) << run.err();
    EXPECT_THAT(run.last_line(), AllOf(StartsWith("farspan: error: "), HasSubstr(message), Not(HasSubstr("rank "))));
    EXPECT_EQ(occurrences(run.err(), "farspan: error: "), 1u) << run.err();
  }
}

TEST_F(MpiTrain, CommandsOnPaperTakeTheWorldFromTheLauncher) {
  Launched groups(fmt::format("-n 4 {} groups --context-parallel-size 2 --json", program()));
  EXPECT_EQ(groups.wait(), 0) << groups.err();
  EXPECT_THAT(groups.out(), StartsWith("{\"world_size\":4,\"sizes\":{\"tp\":1,\"cp\":2,\"dp\":2,\"pp\":1}"));
  EXPECT_EQ(occurrences(groups.out(), "\n"), 1u);
  Launched help(fmt::format("-n 3 {} train --help", program()));
  EXPECT_EQ(help.wait(), 0) << help.err();
}

TEST_F(MpiTrain, VerifyHoldsProcessesAgainstOneRank) {
  const std::string layout = "--context-parallel-size 2 --zero-stage 2 --global-batch-size 2";
  Launched processes(fmt::format("-n 4 {} {}", program(), command("verify", layout + " --json")));
  ASSERT_EQ(processes.wait(), 0) << processes.err();
  const ProgramResult threads = run_program(command("verify", layout + " --ranks 4 --json"));
  EXPECT_EQ(threads.status, 0) << threads.err;
  EXPECT_THAT(threads.out, StartsWith("{\"equal\":true,"));
  EXPECT_EQ(processes.out(), threads.out);
}

TEST_F(MpiTrain, GenerationSaysThatItTakesNoLauncher) {
  Launched run(fmt::format("-n 2 {} {}", program(), command("generate", "--prompt a --load nowhere")));
  EXPECT_EQ(run.wait(), 2);
  EXPECT_THAT(run.last_line(), AllOf(StartsWith("farspan: error: generate runs in one process"),
                                     HasSubstr("start it without the launcher")));
  EXPECT_EQ(occurrences(run.err(), "farspan: error: "), 1u) << run.err();
}

TEST_F(MpiTrain, BackendMpiWithoutALauncherIsAWorldOfOne) {
  const ProgramResult one = run_program(command("train", "--backend mpi " + output("run")));
  EXPECT_EQ(one.status, 0) << one.err;
  const ProgramResult two = run_program(command("train", "--backend mpi --ranks 2 " + output("run")));
  EXPECT_EQ(two.status, 2);
  EXPECT_THAT(two.last_error_line(), HasSubstr("mpirun -n 2"));
}

// --- two hosts
// --------------------------------------------------------------------------------------------------------

// Two network namespaces joined by a pair of virtual interfaces; the second has a host name and shared memory of its
// own. Launch agents enter it as ssh would enter a machine.
class TwoHosts {
 public:
  explicit TwoHosts(const test::ScratchFolder& folder) : name_(fmt::format("farspan-{}", getpid())) {
    const std::string a = name_ + "a", b = name_ + "b";
    made_ =
        run(fmt::format("ip netns add {} && ip netns add {} && ip link add va netns {} type veth peer name vb netns "
                        "{} && ip -n {} addr add 10.77.0.1/24 dev va && ip -n {} addr add 10.77.0.2/24 dev vb && "
                        "ip -n {} link set lo up && ip -n {} link set lo up && ip -n {} link set va up && ip -n {} "
                        "link set vb up && unshare --uts --mount true",
                        a, b, a, b, a, b, a, b, a, b));
    std::filesystem::create_directory(folder.path("tmp"));
    agent_ = folder.write("agent", fmt::format("#!/bin/sh\nshift\nexec ip netns exec {} unshare --uts --mount sh -c "
                                               "\"hostname farspan-b; mount -t tmpfs tmpfs /dev/shm; TMPDIR={}; "
                                               "export TMPDIR; $*\"\n",
                                               b, folder.path("tmp")));
    std::filesystem::permissions(agent_, std::filesystem::perms::owner_all);
  }
  ~TwoHosts() { run(fmt::format("ip netns del {}a; ip netns del {}b", name_, name_)); }
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  bool made() const { return made_; }
  // mpirun on the first, `slots` ranks on each.
  std::string launcher(int slots) const {
    return fmt::format("ip netns exec {}a {} --mca plm_rsh_agent {} --host 10.77.0.1:{},10.77.0.2:{}", name_, mpirun(),
                       agent_, slots, slots);
  }

 private:
  static bool run(const std::string& command) {
    return std::system(fmt::format("({}) >/dev/null 2>&1", command).c_str()) == 0;
  }
  std::string name_;
  std::string agent_;
  bool made_ = false;
};

TEST_F(MpiTrain, TwoHostsGiveTheSameBitsAndNameAKilledRank) {
  const TwoHosts hosts(folder_);
  if (!hosts.made()) GTEST_SKIP() << "this system does not let us make network namespaces (ip netns, unshare)";
  const std::string layout = "--context-parallel-size 2 ";
  ASSERT_EQ(run_program(command("train", "--ranks 4 " + layout + output("threads"))).status, 0);
  Launched trained(fmt::format("-n 4 {} {}", program(), command("train", layout + output("hosts"))), hosts.launcher(2));
  ASSERT_EQ(trained.wait(), 0) << trained.err();
  EXPECT_EQ(without_times(metrics("hosts")), without_times(metrics("threads")));

  Launched run(
      fmt::format("-n 4 {} {}", program(), command("train", layout + "--train-iters 1000000 " + output("killed"))),
      hosts.launcher(2));
  ASSERT_TRUE(reaches("killed", 3)) << run.err();
  kill(run.process_of_rank(3), SIGKILL);
  EXPECT_NE(run.wait(), 0);
  EXPECT_LT(run.seconds_until_gone(10), 10);
  EXPECT_THAT(run.last_line(),
              AllOf(StartsWith("farspan: error: rank 3: process "), HasSubstr(" on host farspan-b ended")));
}

}  // namespace
}  // namespace farspan
