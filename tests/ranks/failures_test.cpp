// SPDX-License-Identifier: Apache-2.0
// What happens when ranks disagree, stop, or never come: who is named, how soon everything ends, which message is left.
#include <atomic>
#include <chrono>
#include <future>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <numeric>
#include <thread>

#include "comm/call_communicator.h"
#include "comm/communicator.h"
#include "comm/dry/dry_communicator.h"
#include "comm/recorder.h"
#include "comm/threads/thread_world.h"
#include "parallel/grid.h"

namespace farspan {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

using Clock = std::chrono::steady_clock;

// Far above what any test takes: a test that needs it has failed.
constexpr double kLongTimeout = 60;
// "Promptly": far below kLongTimeout, far above what a loaded machine needs.
constexpr double kPromptSeconds = 5;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

Tensor view(std::vector<float>& x) { return Tensor(x.data(), DType::f32, {static_cast<int64_t>(x.size())}); }

struct Outcome {
  ErrorKind kind = ErrorKind::internal;
  std::string message;  // empty: no error
  double seconds = 0;
};

Outcome run(int size, double timeout, const std::function<void(int, World&)>& body) {
  const Clock::time_point start = Clock::now();
  try {
    run_thread_ranks(size, timeout, body);
  } catch (const Error& error) {
    return {error.kind(), error.what(), seconds_since(start)};
  }
  return {ErrorKind::internal, "", seconds_since(start)};
}

// Runs body on every rank of one group and returns each rank's own message, whatever the job as a whole reports.
std::vector<std::string> messages_of(int size, const std::function<void(Communicator&)>& body) {
  std::vector<std::string> messages(static_cast<size_t>(size));
  std::atomic<int> over = 0;
  const Outcome outcome = run(size, kLongTimeout, [&](int rank, World& world) {
    const auto group = world.group(rank, all_ranks(size), Dimension::cp);
    try {
      body(*group);
    } catch (const CommunicationError& error) {
      messages[static_cast<size_t>(rank)] = error.what();
    }
    // No rank ends before all have met the disagreement: it is that which is tested, not the end of a rank.
    for (++over; over < size;) std::this_thread::yield();
  });
  EXPECT_EQ(outcome.message, "");
  EXPECT_LT(outcome.seconds, kPromptSeconds);
  return messages;
}

TEST(Failures, DifferentOperationsNameBothSides) {
  const std::vector<std::string> messages = messages_of(3, [](Communicator& group) {
    std::vector<float> x(256), y(768);
    group.barrier("before");
    if (group.rank() == 2) {
      group.all_gather(view(x), view(y), "key/value").wait();
    } else {
      group.reduce_scatter(view(y), view(x), "gradient").wait();
    }
  });
  for (const std::string& message : messages)
    EXPECT_THAT(message, AllOf(HasSubstr("call 1 of cp group [0, 1, 2]"),
                               HasSubstr("rank 2 called all_gather of 1024 bytes of f32 'key/value'"),
                               HasSubstr("called reduce_scatter of 3072 bytes of f32 'gradient'")));
}

TEST(Failures, DifferentSizesNameBothSides) {
  const std::vector<std::string> messages = messages_of(2, [](Communicator& group) {
    std::vector<float> x(group.rank() == 0 ? 10 : 11);
    group.all_reduce(view(x), "loss").wait();
  });
  for (const std::string& message : messages)
    EXPECT_THAT(message, AllOf(HasSubstr("rank 0 called all_reduce of 40 bytes of f32 'loss'"),
                               HasSubstr("rank 1 called all_reduce of 44 bytes of f32 'loss'")));
}

TEST(Failures, DifferentTypesOfEqualSizeNameBothSides) {
  const std::vector<std::string> messages = messages_of(2, [](Communicator& group) {
    std::vector<float> x(8);
    std::vector<double> y(4);
    group.all_reduce(group.rank() == 0 ? view(x) : Tensor(y.data(), DType::f64, {4}), "norm").wait();
  });
  for (const std::string& message : messages)
    EXPECT_THAT(message, AllOf(HasSubstr("32 bytes of f32"), HasSubstr("32 bytes of f64")));
}

TEST(Failures, ExchangeOfUnequalMessagesNamesBothSides) {
  const std::vector<std::string> messages = messages_of(2, [](Communicator& group) {
    std::vector<float> out(6), in(group.rank() == 0 ? 6 : 7);
    const Message send{1 - group.rank(), view(out)}, receive{1 - group.rank(), view(in)};
    group.exchange({&send, 1}, {&receive, 1}, "hop 3").wait();
  });
  for (const std::string& message : messages)
    EXPECT_THAT(message, AllOf(HasSubstr("message 0 from rank 0 to rank 1"), HasSubstr("rank 0 sends 24 bytes"),
                               HasSubstr("rank 1 receives 28 bytes"), HasSubstr("hop 3")));
}

TEST(Failures, ExchangeWithoutACounterpartNamesBothSides) {
  const std::vector<std::string> messages = messages_of(2, [](Communicator& group) {
    std::vector<float> out(6), in(6);
    const Message send{1, view(out)}, receive{1, view(in)};
    if (group.rank() == 0) {
      group.exchange({&send, 1}, {&receive, 1}, "hop").wait();
    } else {
      group.exchange({}, {}, "last hop").wait();
      group.barrier("after");
    }
  });
  // Whoever comes second finds the misfit, and each looks at what it receives first.
  for (const std::string& message : messages)
    EXPECT_THAT(message, AnyOf(AllOf(HasSubstr("rank 0 sends 24 bytes of f32 ('hop')"),
                                     HasSubstr("rank 1 receives nothing ('last hop')")),
                               AllOf(HasSubstr("rank 1 sends nothing ('last hop')"),
                                     HasSubstr("rank 0 receives 24 bytes of f32 ('hop')"))));
}

TEST(Failures, AnnouncedCallsThatDifferNameBothSides) {
  const std::vector<std::string> messages = messages_of(2, [](Communicator& group) {
    CallArguments call;
    call.operation = Operation::all_gather;
    call.dtype = DType::bf16;
    call.bytes = 64 + 2 * group.rank();
    call.label = "key/value";
    dynamic_cast<CallCommunicator&>(group).announce(call).wait();
  });
  for (const std::string& message : messages)
    EXPECT_THAT(message, AllOf(HasSubstr("rank 0 called all_gather of 64 bytes of bf16 'key/value'"),
                               HasSubstr("rank 1 called all_gather of 66 bytes of bf16 'key/value'")));
}

TEST(Failures, TimeOutNamesTheCallAndTheMissingRank) {
  const Outcome outcome = run(4, 0.3, [](int rank, World& world) {
    const auto group = world.group(rank, all_ranks(4), Dimension::cp);
    std::vector<float> part(256), whole(1024);
    world.set_position(rank, fmt::format("step 3, layer {} forward", rank));
    group->barrier("start");
    if (rank == 2) {
      // In its own work until the others have given up.
      while (!world.aborted()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
    group->all_gather(view(part), view(whole), "layer 5 key/value").wait();
  });
  EXPECT_EQ(outcome.kind, ErrorKind::communication);
  EXPECT_THAT(outcome.message,
              AllOf(StartsWith("rank "), HasSubstr("all_gather 'layer 5 key/value' of 1024 bytes"),
                    HasSubstr("call 1 of cp group [0, 1, 2, 3]"), HasSubstr("waited 0.3 s"),
                    HasSubstr("rank 2 has not come (at step 3, layer 2 forward; last call: barrier 'start'")));
  EXPECT_THAT(outcome.message, Not(HasSubstr("\n")));
  EXPECT_GE(outcome.seconds, 0.3);
  EXPECT_LT(outcome.seconds, kPromptSeconds);
}

TEST(Failures, TimeOutOfARankThatPostedButNeverWaits) {
  const Outcome outcome = run(2, 0.3, [](int rank, World& world) {
    const auto group = world.group(rank, {0, 1}, Dimension::cp);
    std::vector<float> out(4), in(4);
    const Message send{1 - rank, view(out)}, receive{1 - rank, view(in)};
    Work work = group->exchange({&send, 1}, {&receive, 1}, "hop");
    if (rank == 1)
      while (!world.aborted()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    work.wait();
  });
  EXPECT_THAT(outcome.message, AllOf(StartsWith("rank 0: exchange 'hop' of 16 bytes"),
                                     HasSubstr("rank 1 has not finished (last call: exchange 'hop' of 16 bytes")));
}

TEST(Failures, AbortEndsEveryWaitOfEveryGroup) {
  ThreadWorld world(4, kLongTimeout);
  std::atomic<int> waiting = 0;
  std::vector<std::future<double>> ended;
  std::vector<std::string> messages(4);
  std::atomic<Clock::rep> aborted_at = 0;
  for (int rank = 1; rank < 4; ++rank)
    ended.push_back(std::async(std::launch::async, [&, rank] {
      // Rank 1 waits in cp, 2 and 3 in dp; rank 0 and the second half of each group never come.
      const auto group = world.group(rank, rank == 1 ? std::vector<int>{0, 1} : all_ranks(4),
                                     rank == 1 ? Dimension::cp : Dimension::dp);
      std::vector<float> x(8);
      try {
        Work work = group->all_reduce(view(x), "never");
        ++waiting;
        work.wait();
      } catch (const CommunicationError& error) {
        messages[static_cast<size_t>(rank)] = error.what();
      }
      const double latency = seconds_since(Clock::time_point(Clock::duration(aborted_at.load())));
      // So does every later call.
      EXPECT_THROW(group->barrier("later"), CommunicationError);
      return latency;
    }));
  while (waiting < 3) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  aborted_at = Clock::now().time_since_epoch().count();
  world.abort(0, "the disk is full");
  world.abort(3, "a later reason");
  for (auto& latency : ended) EXPECT_LT(latency.get(), kPromptSeconds);
  for (int rank = 1; rank < 4; ++rank)
    EXPECT_THAT(messages[static_cast<size_t>(rank)], HasSubstr("rank 0 failed: the disk is full"));
  EXPECT_TRUE(world.aborted());
}

size_t occurrences(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

// Rank 1 throws at step 3 in the loader, in forward between two collectives of different groups, and in a checkpoint
// while calls are open; tp = 2, cp = 2.
TEST(Failures, B112_ARankThrowsAndAllEndWithItsMessage) {
  const Grid grid({.tp = 2, .cp = 2}, "tp-cp-dp-pp");
  for (const std::string place : {"loader", "forward", "checkpoint"}) {
    SCOPED_TRACE(place);
    std::atomic<int> left = 0;
    const Outcome outcome = run(4, kLongTimeout, [&](int rank, World& world) {
      struct Leaves {
        std::atomic<int>& count;
        ~Leaves() { ++count; }
      } leaves{left};
      const auto tp = world.group(rank, grid.group_of(rank, Dimension::tp), Dimension::tp);
      const auto cp = world.group(rank, grid.group_of(rank, Dimension::cp), Dimension::cp);
      const auto everyone = world.group(rank, grid.group_of(rank, Dimension::world), Dimension::world);
      const auto fail_at = [&](int step, const std::string& here) {
        if (rank == 1 && step == 3 && place == here) throw DataError(here + ": byte 17 is not a token");
      };
      std::vector<float> x(100), y(100), z(100);
      for (int step = 1; step <= 5; ++step) {
        fail_at(step, "loader");
        const Message send{1 - cp->rank(), view(x)}, receive{1 - cp->rank(), view(y)};
        Work hop = cp->exchange({&send, 1}, {&receive, 1}, "hop");
        fail_at(step, "forward");
        tp->all_reduce(view(z), "activations").wait();
        hop.wait();
        Work gradient = everyone->all_reduce(view(x), "gradient");
        fail_at(step, "checkpoint");
        gradient.wait();
      }
    });
    EXPECT_EQ(outcome.kind, ErrorKind::data);
    EXPECT_EQ(outcome.message, "rank 1: " + place + ": byte 17 is not a token");
    EXPECT_EQ(occurrences(outcome.message, "byte 17"), 1u);
    EXPECT_EQ(left.load(), 4);
    EXPECT_LT(outcome.seconds, kPromptSeconds);
  }
}

// The peer's wait ends when the failing rank takes its memory back, before the failing rank's own exception arrives.
TEST(Failures, TheCauseIsReportedNotTheConsequence) {
  const Outcome outcome = run(2, kLongTimeout, [](int rank, World& world) {
    const auto group = world.group(rank, {0, 1}, Dimension::cp);
    std::vector<float> x(100);
    struct SlowToUnwind {
      ~SlowToUnwind() { std::this_thread::sleep_for(std::chrono::milliseconds(100)); }
    } slow;
    Work work = group->all_reduce(view(x), "sum");
    if (rank == 1) throw MemoryError("17 GiB do not fit");
    work.wait();
  });
  EXPECT_EQ(outcome.kind, ErrorKind::memory);
  EXPECT_EQ(outcome.message, "rank 1: 17 GiB do not fit");
}

// Rank 0 offers memory, throws, and frees it while the others may be copying from it. The sanitizers watch.
TEST(Failures, MemoryIsNotReadAfterItsRankUnwound) {
  for (int turn = 0; turn < 20; ++turn) {
    const Outcome outcome = run(4, kLongTimeout, [&](int rank, World& world) {
      const auto group = world.group(rank, all_ranks(4), Dimension::cp);
      std::vector<float> part(50'000, 1), whole(200'000);
      Work work = group->all_gather(view(part), view(whole), "gather");
      if (rank == 0) {
        for (int i = 0; i < turn; ++i) std::this_thread::yield();
        throw DataError("bad row");
      }
      work.wait();
    });
    EXPECT_EQ(outcome.message, "rank 0: bad row");
  }
}

TEST(Failures, ARankThatEndsEarlyIsNamed) {
  const Outcome outcome = run(3, kLongTimeout, [](int rank, World& world) {
    const auto group = world.group(rank, all_ranks(3), Dimension::dp);
    std::vector<float> x(10);
    group->all_reduce(view(x), "step 1").wait();
    if (rank == 1) return;
    group->all_reduce(view(x), "step 2").wait();
  });
  EXPECT_EQ(outcome.kind, ErrorKind::communication);
  EXPECT_THAT(outcome.message, AllOf(HasSubstr("all_reduce 'step 2'"), HasSubstr("waits for rank 1, which has ended"),
                                     HasSubstr("last call: all_reduce 'step 1'")));
  EXPECT_LT(outcome.seconds, kPromptSeconds);
}

TEST(Failures, OtherExceptionsBecomeInternalErrors) {
  const Outcome standard = run(2, kLongTimeout, [](int rank, World& world) {
    const auto group = world.group(rank, {0, 1}, Dimension::cp);
    if (rank == 1) throw std::out_of_range("index 9 of 9");
    group->barrier("end");
  });
  EXPECT_EQ(standard.kind, ErrorKind::internal);
  EXPECT_EQ(standard.message, "rank 1: index 9 of 9");
  const Outcome unknown = run(2, kLongTimeout, [](int, World&) { throw 7; });
  EXPECT_EQ(unknown.kind, ErrorKind::internal);
  EXPECT_THAT(unknown.message, HasSubstr("unknown type"));
  EXPECT_THROW(run_thread_ranks(2, kLongTimeout, [](int, World&) { throw ConfigError("no"); }), ConfigError);
}

TEST(Failures, ALoneRankFailsLikeTheOthers) {
  const std::thread::id caller = std::this_thread::get_id();
  const Outcome outcome = run(1, kLongTimeout, [&](int rank, World&) {
    EXPECT_EQ(rank, 0);
    EXPECT_EQ(std::this_thread::get_id(), caller);
    throw DataError("empty file");
  });
  EXPECT_EQ(outcome.kind, ErrorKind::data);
  EXPECT_EQ(outcome.message, "rank 0: empty file");
}

TEST(Failures, AnAbortWithoutAnExceptionStillFailsTheJob) {
  const Outcome outcome = run(2, kLongTimeout, [](int rank, World& world) {
    const auto group = world.group(rank, {0, 1}, Dimension::cp);
    if (rank == 1) {
      world.abort(1, "stopped by a signal");
      return;
    }
    group->barrier("end");
  });
  EXPECT_EQ(outcome.message, "rank 1: stopped by a signal");
}

TEST(Failures, AWorkDestroyedWithoutWaitIsReported) {
  const Outcome outcome = run(2, kLongTimeout, [](int rank, World& world) {
    const auto group = world.group(rank, {0, 1}, Dimension::cp);
    std::vector<float> x(10);
    Work work = group->all_reduce(view(x), "forgotten");
    if (rank == 0) work.wait();
  });
  EXPECT_EQ(outcome.kind, ErrorKind::internal);
  EXPECT_THAT(outcome.message, AllOf(StartsWith("rank 1: "), HasSubstr("'forgotten'"), HasSubstr("without a wait")));
}

TEST(Failures, WrongTensorsAreInternalErrorsInEveryBackend) {
  const auto check = [](Communicator& group) {
    std::vector<float> x(10), y(20);
    std::vector<BFloat16> half(10);
    const Tensor bf16(half.data(), DType::bf16, {10});
    const Message nowhere{2, view(x)};
    EXPECT_THROW(group.all_gather(view(x), view(x), "size"), InternalError);
    EXPECT_THROW(group.all_gather(bf16, view(y), "type"), InternalError);
    EXPECT_THROW(group.reduce_scatter(view(x), view(y), "swapped"), InternalError);
    EXPECT_THROW(group.all_reduce(bf16, "bf16"), InternalError);
    EXPECT_THROW(group.all_reduce(Tensor(), "undefined"), InternalError);
    EXPECT_THROW(group.all_reduce(view(y).reshape({4, 5}).slice(1, 0, 2), "strided"), InternalError);
    EXPECT_THROW(group.all_to_all(view(x), view(y), "sizes"), InternalError);
    EXPECT_THROW(group.all_to_all(view(x).slice(0, 0, 9), view(y).slice(0, 0, 9), "uneven"), InternalError);
    EXPECT_THROW(group.exchange({&nowhere, 1}, {}, "no such peer"), InternalError);
    EXPECT_EQ(group.traffic().calls, 0);
  };
  check(*make_dry_communicator(Dimension::cp, 1, {0, 1}));
  run_thread_ranks(2, kLongTimeout, [&](int rank, World& world) {
    const auto group = world.group(rank, {0, 1}, Dimension::cp);
    check(*group);
    std::vector<float> x(20);
    EXPECT_THROW(group->all_to_all(view(x), view(x), "in place"), InternalError);
    EXPECT_THROW(group->all_gather(view(x).slice(0, 1, 6), view(x).slice(0, 0, 10), "off its place"), InternalError);
    const Message message{1 - rank, view(x)};
    EXPECT_THROW(group->exchange({&message, 1}, {&message, 1}, "same memory"), InternalError);
    EXPECT_THROW(world.group(rank, {1 - rank}, Dimension::cp), InternalError);
    EXPECT_THROW(world.group(rank, {0, 1, 1}, Dimension::cp), InternalError);
    EXPECT_THROW(world.group(rank, {0, 1, 2}, Dimension::cp), InternalError);
    group->barrier("still in step");
  });
}

TEST(Failures, ReportTellsWhoWaitsAndWhoIsMissing) {
  std::string report;
  run_thread_ranks(3, kLongTimeout, [&](int rank, World& world) {
    const auto group = world.group(rank, all_ranks(3), Dimension::cp);
    world.set_position(rank, "step 3, layer 5 backward");
    std::vector<float> x(10);
    group->barrier("start");
    if (rank == 1) {
      // Until both others wait.
      for (report = world.report();
           occurrences(report, "'gradient' of 40 bytes, call 1 of cp group [0, 1, 2], waiting") < 2;
           report = world.report())
        std::this_thread::yield();
    }
    group->all_reduce(view(x), "gradient").wait();
  });
  EXPECT_THAT(report,
              HasSubstr("all_reduce 'gradient' of 40 bytes, call 1 of cp group [0, 1, 2]: open on ranks [0, 2], "
                        "not called by ranks [1]\n"));
  EXPECT_THAT(report, HasSubstr("rank 1 at step 3, layer 5 backward\n  barrier 'start' of 0 bytes, call 0"));
  EXPECT_THAT(report, HasSubstr("posted at step 3, layer 5 backward"));
}

TEST(Recorder, KeepsTheLatestOperations) {
  Recorder recorder;
  const int64_t total = Recorder::kCapacity + 10;
  std::vector<int64_t> tickets;
  for (int64_t i = 0; i < total; ++i) {
    recorder.set_position(fmt::format("step {}", i));
    tickets.push_back(recorder.record("cp group [0, 1]", i, Operation::all_gather, fmt::format("call {}", i), 8 * i));
  }
  for (int64_t i = 0; i < total; i += 2) recorder.set_progress(tickets[static_cast<size_t>(i)], CallProgress::done);
  const std::vector<OperationRecord> latest = recorder.latest();
  ASSERT_EQ(static_cast<int64_t>(latest.size()), Recorder::kCapacity);
  for (size_t i = 0; i < latest.size(); ++i) {
    const int64_t number = static_cast<int64_t>(i) + 10;
    EXPECT_EQ(latest[i].sequence, number);
    EXPECT_EQ(latest[i].label, fmt::format("call {}", number));
    EXPECT_EQ(latest[i].bytes, 8 * number);
    EXPECT_EQ(latest[i].position, fmt::format("step {}", number));
    EXPECT_EQ(latest[i].progress, number % 2 == 0 ? CallProgress::done : CallProgress::posted);
  }
  EXPECT_EQ(recorder.latest(3).size(), 3u);
  EXPECT_EQ(recorder.whereabouts(),
            "at step 73; last call: all_gather 'call 73' of 584 bytes, call 73 of cp group [0, 1], "
            "posted");
}

// A rank in an endless loop of its own cannot be joined: the process ends, with the status of the first failure and its
// message last.
TEST(FailuresDeathTest, AStuckRankDoesNotKeepTheProcess) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto stuck = [] {
    std::atomic<bool> in_the_loop = false;
    run_thread_ranks(
        3, kLongTimeout,
        [&](int rank, World& world) {
          const auto group = world.group(rank, all_ranks(3), Dimension::cp);
          world.set_position(rank, "step 2, loader");
          group->barrier("start");
          if (rank == 1) {
            while (!in_the_loop) std::this_thread::yield();
            throw DataError("bad row");
          }
          if (rank == 2)
            for (in_the_loop = true;;) std::this_thread::sleep_for(std::chrono::seconds(1));
          group->barrier("end");
        },
        0.2);
  };
  const Clock::time_point start = Clock::now();
  EXPECT_EXIT(stuck(), testing::ExitedWithCode(static_cast<int>(ErrorKind::data)),
              "farspan: error: rank 1: bad row; did not stop within 0.2 s after that: rank 2 .at step 2, loader; last "
              "call: barrier 'start'.*\n$");
  EXPECT_LT(seconds_since(start), kPromptSeconds);
}

}  // namespace
}  // namespace farspan
