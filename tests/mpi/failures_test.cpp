// SPDX-License-Identifier: Apache-2.0
// What happens among processes when ranks disagree, throw, get stuck or are killed: who is named, how soon everything
// ends, which message is left. Each case is a body that this program runs under mpirun (--case NAME); the tests look at
// what a user would see.
#include <csignal>
#include <cstring>
#include <functional>
#include <gmock/gmock.h>
#include <map>
#include <memory>
#include <numeric>

#include "comm/mpi/mpi_world.h"
#include "parallel/grid.h"
#include "tests/mpi/launched.h"

namespace farspan {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// --- the cases
// --------------------------------------------------------------------------------------------------------

std::vector<int> everyone(const World& world) {
  std::vector<int> ranks(static_cast<size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

Tensor view(std::vector<float>& x) { return Tensor(x.data(), DType::f32, {static_cast<int64_t>(x.size())}); }

[[noreturn]] void sleep_for_ever() {
  while (true) std::this_thread::sleep_for(std::chrono::seconds(1));
}

// Until another rank, which nothing keeps from it any more, has come to where it stays: before that it would be waiting
// in a call, and would stop with the failure.
void let_others_get_stuck() { std::this_thread::sleep_for(std::chrono::milliseconds(300)); }

// Five steps of tp = 2, cp = 2; at step 3 `fault` is called at three places with the place's name.
void train(int rank, World& world, const std::function<void(const std::string& place)>& fault) {
  const Grid grid({.tp = 2, .cp = 2}, "tp-cp-dp-pp");
  const auto tp = world.group(rank, grid.group_of(rank, Dimension::tp), Dimension::tp);
  const auto cp = world.group(rank, grid.group_of(rank, Dimension::cp), Dimension::cp);
  const auto all = world.group(rank, everyone(world), Dimension::world);
  std::vector<float> x(100'000), y(100'000), z(100);
  for (int step = 1; step <= 5; ++step) {
    world.set_position(rank, fmt::format("step {}, loader", step));
    if (step == 3) fault("loader");
    world.set_position(rank, fmt::format("step {}, layer 5 forward", step));
    const Message send{1 - cp->rank(), view(x)}, receive{1 - cp->rank(), view(y)};
    Work hop = cp->exchange({&send, 1}, {&receive, 1}, "layer 5 key/value");
    if (step == 3) fault("forward");
    tp->all_reduce(view(z), "activations").wait();
    hop.wait();
    Work gradient = all->all_reduce(view(x), "gradient");
    if (step == 3) fault("checkpoint");
    gradient.wait();
  }
}

void rank_throws(int rank, World& world, const std::string& place) {
  train(rank, world, [&](const std::string& here) {
    if (rank == 1 && here == place) throw DataError(here + ": byte 17 is not a token");
  });
}

void rank_dies(int rank, World& world, int victim, int signal) {
  train(rank, world, [&](const std::string& here) {
    if (rank == victim && here == "forward") raise(signal);
  });
}

void sizes_differ(int rank, World& world) {
  const auto group = world.group(rank, everyone(world), Dimension::cp);
  std::vector<float> x(rank == 2 ? 11 : 10);
  group->barrier("before");
  group->all_reduce(view(x), "loss").wait();
}

void operations_differ(int rank, World& world) {
  const auto group = world.group(rank, everyone(world), Dimension::cp);
  std::vector<float> part(25'000), whole(100'000);
  if (rank == 2)
    group->all_gather(view(part), view(whole), "key/value").wait();
  else
    group->reduce_scatter(view(whole), view(part), "gradient").wait();
}

void order_differs(int rank, World& world) {
  const auto group = world.group(rank, everyone(world), Dimension::cp);
  std::vector<float> x(10), y(10);
  Work first = group->all_reduce(view(x), rank == 0 ? "loss" : "norm");
  if (rank == 0) group->barrier("end of step");
  Work second = group->all_reduce(view(y), rank == 0 ? "norm" : "loss");
  first.wait();
  second.wait();
}

void messages_differ(int rank, World& world) {
  const auto group = world.group(rank, everyone(world), Dimension::cp);
  std::vector<float> out(6), in(rank == 0 ? 6 : 7);
  const Message send{rank ^ 1, view(out)}, receive{rank ^ 1, view(in)};
  group->exchange({&send, 1}, {&receive, 1}, "hop 3").wait();
}

void message_without_counterpart(int rank, World& world) {
  const auto group = world.group(rank, everyone(world), Dimension::cp);
  std::vector<float> out(6), in(6);
  const Message send{1, view(out)}, receive{1, view(in)};
  if (rank == 0)
    group->exchange({&send, 1}, {&receive, 1}, "hop").wait();
  else
    group->exchange({}, {}, "last hop").wait();
  group->barrier("after");
}

const std::map<std::string, RankBody>& cases() {
  static const std::map<std::string, RankBody> table = {
      {"throw-loader", [](int rank, World& world) { rank_throws(rank, world, "loader"); }},
      {"throw-forward", [](int rank, World& world) { rank_throws(rank, world, "forward"); }},
      {"throw-checkpoint", [](int rank, World& world) { rank_throws(rank, world, "checkpoint"); }},
      {"kill-1", [](int rank, World& world) { rank_dies(rank, world, 1, SIGKILL); }},
      {"kill-0", [](int rank, World& world) { rank_dies(rank, world, 0, SIGKILL); }},
      {"kill-1-stuck-0",  // as where a GPU works on for a moment
       [](int rank, World& world) {
         train(rank, world, [&](const std::string& here) {
           if (rank == 0 && here == "forward") sleep_for_ever();
           if (rank != 1 || here != "forward") return;
           let_others_get_stuck();
           raise(SIGKILL);
         });
       }},
      {"crash", [](int rank, World& world) { rank_dies(rank, world, 3, SIGSEGV); }},
      {"stuck",
       [](int rank, World& world) {
         train(rank, world, [&](const std::string& here) {
           if (rank == 2 && here == "loader") sleep_for_ever();
         });
       }},
      {"stuck-0",  // rank 0's process is the one that speaks
       [](int rank, World& world) {
         train(rank, world, [&](const std::string& here) {
           if (rank == 0 && here == "loader") sleep_for_ever();
           if (rank != 3 || here != "loader") return;
           let_others_get_stuck();
           throw DataError("bad row");
         });
       }},
      {"sizes", sizes_differ},
      {"operations", operations_differ},
      {"order", order_differs},
      {"messages", messages_differ},
      {"counterpart", message_without_counterpart},
      {"early-end",
       [](int rank, World& world) {
         const auto group = world.group(rank, everyone(world), Dimension::dp);
         group->barrier("step 1");
         if (rank != 1) group->barrier("step 2");
       }},
      {"unwaited",
       [](int rank, World& world) {
         const auto group = world.group(rank, everyone(world), Dimension::dp);
         std::vector<float> x(10);
         Work work = group->all_reduce(view(x), "forgotten");
         if (rank != 1) work.wait();
       }},
      {"long",
       [](int rank, World& world) {
         const auto group = world.group(rank, everyone(world), Dimension::dp);
         for (int step = 1; step < 3000; ++step) {
           world.set_position(rank, fmt::format("step {}", step));
           group->barrier("step");
           std::this_thread::sleep_for(std::chrono::milliseconds(10));
         }
       }},
  };
  return table;
}

int run_case(const std::string& name) {
  const char* size = std::getenv("OMPI_COMM_WORLD_SIZE");
  Processes processes("mpirun", size == nullptr ? 1 : std::atoi(size));
  try {
    const double timeout = name.starts_with("stuck") ? 1.5 : 60;
    run_process_rank(processes, timeout, cases().at(name));
    processes.finish();
  } catch (const Error& error) {
    processes.leave({.rank = processes.rank(),
                     .kind = error.kind(),
                     .message = error.what(),
                     .consequence = false,
                     .missing = {},
                     .outside = true});
  }
  return 0;
}

// --- the tests
// --------------------------------------------------------------------------------------------------------

// "Promptly": far below the cases' time-out, far above what a loaded machine needs.
constexpr double kPromptSeconds = 15;

struct Outcome {
  int status = 0;
  double seconds = 0;
  std::string last_line;
  std::vector<std::string> lines;
  std::string err;
};

Outcome run(const std::string& name, int processes) {
  Launched launched(
      fmt::format("-n {} {} --case {}", processes, std::filesystem::read_symlink("/proc/self/exe").string(), name));
  Outcome outcome;
  outcome.status = launched.wait();
  outcome.seconds = launched.seconds();
  outcome.last_line = launched.last_line();
  outcome.lines = launched.program_lines();
  outcome.err = launched.err();
  EXPECT_LT(launched.seconds_until_gone(10), 10) << "processes are left: " << launched.command();
  EXPECT_LT(outcome.seconds, kPromptSeconds) << launched.command();
  int errors = 0;
  for (const std::string& line : outcome.lines) errors += line.starts_with("farspan: error: ");
  EXPECT_EQ(errors, 1) << outcome.err;
  return outcome;
}

class Place : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(MpiFailures, Place, testing::Values("loader", "forward", "checkpoint"),
                         [](const auto& place) { return std::string(place.param); });

TEST_P(Place, B112_ARankThrowsAndAllProcessesEndWithItsMessage) {
  const std::string place = GetParam();
  const Outcome outcome = run("throw-" + place, 4);
  EXPECT_EQ(outcome.status, 3) << outcome.err;
  EXPECT_EQ(outcome.last_line, "farspan: error: rank 1: " + place + ": byte 17 is not a token");
}

TEST(MpiFailures, AKilledRankIsNamedAtOnce) {
  const Outcome outcome = run("kill-1", 4);
  // The launcher's own status for a process that a signal ended.
  EXPECT_EQ(outcome.status, 128 + SIGKILL) << outcome.err;
  EXPECT_THAT(outcome.last_line, AllOf(StartsWith("farspan: error: rank 1: process "),
                                       HasSubstr("ended without a word: it was killed or has crashed")));
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("farspan: rank 1's process is gone\n"),
                                 HasSubstr("exchange 'layer 5 key/value' of 400000 bytes, call 2 of cp group")));
}

TEST(MpiFailures, AKilledRankZeroIsNamedByAnother) {
  EXPECT_THAT(run("kill-0", 4).last_line,
              AllOf(StartsWith("farspan: error: rank 0: process "), HasSubstr("ended without a word")));
}

// The launcher leaves no time to wait for the stuck one for as long as after other failures.
TEST(MpiFailures, AKilledRankIsNamedByOneThatIsStuck) {
  EXPECT_THAT(run("kill-1-stuck-0", 4).last_line,
              AllOf(StartsWith("farspan: error: rank 1: process "), HasSubstr("ended without a word"),
                    HasSubstr("did not stop within 0.2 s after that: rank 0")));
}

TEST(MpiFailures, ACrashIsNamed) {
  EXPECT_THAT(run("crash", 4).last_line,
              AllOf(StartsWith("farspan: error: rank 3: process "), HasSubstr("ended without a word")));
}

TEST(MpiFailures, ARankStuckInTheLoaderIsNamedWithItsPlace) {
  const Outcome outcome = run("stuck", 4);
  EXPECT_EQ(outcome.status, 5) << outcome.err;
  EXPECT_THAT(outcome.last_line,
              AllOf(HasSubstr("waited 1.5 s"), HasSubstr("rank 2 has not come"),
                    HasSubstr("rank 2 at step 3, loader; last call: all_reduce 'gradient' of 400000 bytes, call 1 of"),
                    HasSubstr("did not stop within 2 s after that: rank 2")));
  // The merged report: in what the others wait, who is missing.
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("not called by ranks [2]\n"), HasSubstr("farspan: rank 2 at step 3, loader"),
                                 HasSubstr("at step 3, layer 5 forward\n")));
}

TEST(MpiFailures, AStuckRankZeroDoesNotHideTheFailure) {
  const Outcome outcome = run("stuck-0", 4);
  EXPECT_EQ(outcome.status, 3) << outcome.err;
  EXPECT_THAT(
      outcome.last_line,
      AllOf(StartsWith("farspan: error: rank 3: bad row; did not stop within 2 s after that: rank 0 (at step 3, "
                       "loader; last call: ")));
}

TEST(MpiFailures, DisagreementsNameBothSides) {
  EXPECT_THAT(run("sizes", 3).last_line,
              AllOf(HasSubstr("call 1 of cp group [0, 1, 2]: rank "), HasSubstr("called all_reduce of 40 bytes of f32"),
                    HasSubstr("rank 2 called all_reduce of 44 bytes of f32 'loss'")));
  EXPECT_THAT(run("operations", 4).last_line,
              AllOf(HasSubstr("rank 2 called all_gather of 100000 bytes of f32 'key/value'"),
                    HasSubstr("called reduce_scatter of 400000 bytes of f32 'gradient'")));
  EXPECT_THAT(
      run("order", 2).last_line,
      AllOf(HasSubstr("call 1 of cp group [0, 1]: rank 0 called barrier 'end of step', rank 1 called all_reduce "
                      "of 40 bytes of f32 'loss'")));
  const Outcome messages = run("messages", 2);
  EXPECT_EQ(messages.status, 5);
  EXPECT_THAT(messages.last_line, AllOf(HasSubstr("message 0 from rank 0 to rank 1: rank 0 sends 24 bytes of f32 ('hop "
                                                  "3'), rank 1 receives 28 bytes of f32")));
  EXPECT_THAT(run("counterpart", 2).last_line,
              AllOf(HasSubstr("rank 0 called exchange 'hop', rank 1 called barrier 'after'")));
}

TEST(MpiFailures, ARankThatEndsEarlyIsNamed) {
  EXPECT_THAT(run("early-end", 3).last_line,
              AllOf(HasSubstr("barrier 'step 2'"), HasSubstr("waits for rank 1, which has ended its work; rank 1 last "
                                                             "call: barrier 'step 1'")));
}

TEST(MpiFailures, AWorkDestroyedWithoutWaitIsReported) {
  const Outcome outcome = run("unwaited", 2);
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  EXPECT_THAT(outcome.last_line,
              AllOf(StartsWith("farspan: error: rank 1: all_reduce 'forgotten'"), HasSubstr("without a wait")));
}

// Interrupt the launcher, kill it outright, kill a worker outright, freeze a worker.
TEST(MpiFailures, B113_NoProcessIsLeft) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  for (const auto& [what, signal] : {std::pair{"launcher", SIGINT}, {"launcher", SIGKILL}, {"worker", SIGKILL}}) {
    Launched launched(fmt::format("-n 3 {} --case long", self));
    while (launched.process_of_rank(2) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
    kill(what == std::string("launcher") ? launched.launcher() : launched.process_of_rank(2), signal);
    launched.wait();
    EXPECT_LT(launched.seconds_until_gone(10), 10) << what << ", signal " << signal;
  }
}

}  // namespace
}  // namespace farspan

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--case") == 0) return farspan::run_case(argv[2]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
