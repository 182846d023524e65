// SPDX-License-Identifier: Apache-2.0
// Thread ranks whose work is queued, as on a GPU, where there is none: each rank has a compute queue and a mover with a
// queue of its own, served by threads in place of streams. A wait that is missing gives wrong numbers here, and a data
// race under the thread sanitizer; one too many gives a deadlock.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <condition_variable>
#include <deque>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "comm/rank_order_sum.h"
#include "comm/threads/mover.h"
#include "comm/threads/thread_communicator.h"
#include "comm/threads/thread_job.h"

namespace farspan {
namespace {

// An event.
class Point {
 public:
  void reach() {
    const std::lock_guard lock(mutex_);
    reached_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
};

// A stream.
class Queue {
 public:
  Queue() : thread_([this] { serve(); }) {}
  ~Queue() {
    add(nullptr);
    thread_.join();
  }
  void add(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }
  std::shared_ptr<Point> record() {
    auto point = std::make_shared<Point>();
    add([point] { point->reach(); });
    return point;
  }
  void wait_for(std::shared_ptr<Point> point) {
    add([point = std::move(point)] { point->wait(); });
  }

 private:
  void serve() {
    while (true) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      if (!task) return;
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
};

struct QueuedTrail final : Trail {
  std::shared_ptr<Point> points[5];  // by stage
};

std::shared_ptr<Point> point_of(const Posting& posting, Stage stage) {
  std::shared_ptr<Point> point = static_cast<const QueuedTrail&>(*posting.trail).points[static_cast<int>(stage)];
  FARSPAN_CHECK(point != nullptr, "a point that is not recorded");
  return point;
}

class QueuedMover final : public Mover {
 public:
  explicit QueuedMover(Queue& compute) : compute_(compute) {}
  bool queues() const override { return true; }
  void offer(Posting& own) override {
    auto trail = std::make_unique<QueuedTrail>();
    trail->points[static_cast<int>(Stage::posted)] = compute_.record();
    own.trail = std::move(trail);
  }
  void follow(const Posting& posting, Stage stage) override { transfers_.wait_for(point_of(posting, stage)); }
  void copy(std::byte* target, const std::byte* source, int64_t bytes) override {
    transfers_.add([=] { std::copy_n(source, bytes, target); });
  }
  void sum(DType dtype, std::span<const std::byte* const> sources, int64_t offset, int64_t count,
           std::byte* out) override {
    transfers_.add([=, all = std::vector<const std::byte*>(sources.begin(), sources.end())] {
      sum_in_rank_order(dtype, all, offset, count, out);
    });
  }
  void reach(Posting& own, Stage stage) override {
    static_cast<QueuedTrail&>(*own.trail).points[static_cast<int>(stage)] = transfers_.record();
  }
  void resume(std::span<const Posting* const> postings) override {
    for (const Posting* posting : postings) compute_.wait_for(point_of(*posting, Stage::received));
  }
  void settle(std::span<const Posting* const> postings) noexcept override {
    transfers_.record()->wait();
    for (const Posting* posting : postings)
      for (Stage stage : {Stage::reduced, Stage::received})
        if (const auto& point = static_cast<const QueuedTrail&>(*posting->trail).points[static_cast<int>(stage)])
          point->wait();
  }
  double take_exposed_seconds() override { return 0; }

 private:
  Queue& compute_;
  Queue transfers_;
};

constexpr int kRanks = 4;
constexpr int64_t kElements = 400;

struct Rank {
  int rank = 0;
  Queue& compute;
  Communicator& first;
  Communicator& second;  // another group of the same ranks
};

void run(const std::function<void(Rank&)>& body) {
  constexpr double kTimeout = 60;
  auto job = std::make_shared<ThreadJob>(kRanks, kTimeout);
  std::vector<int> ranks(kRanks);
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        Queue compute;
        const auto make = [&](Dimension dimension) {
          return ThreadCommunicator(job, job->group(rank, ranks, dimension), dimension, rank, ranks,
                                    std::make_unique<QueuedMover>(compute));
        };
        ThreadCommunicator first = make(Dimension::cp), second = make(Dimension::dp);
        Rank context{rank, compute, first, second};
        body(context);
        compute.record()->wait();
      } catch (...) {
        job->fail(failure_of(rank, std::current_exception()));
      }
      job->end(rank);
    });
  for (std::thread& thread : threads) thread.join();
  if (const auto failure = job->failure()) throw_error(failure->kind, failure->message);
}

float value(int rank, int turn, int64_t i) {
  return static_cast<float>(1000 * turn + 100 * rank) + static_cast<float>(i) / 8;
}

float sum_at(int turn, int64_t i) {
  float sum = value(0, turn, i);
  for (int rank = 1; rank < kRanks; ++rank) sum += value(rank, turn, i);
  return sum;
}

struct Kind {
  const char* name;
  std::function<Work(Communicator&, Tensor source, Tensor target)> start;
  std::function<float(int rank, int turn, int64_t i)> expected;
  int64_t elements = kElements;  // of the result
  bool in_place = false;
};

std::vector<Kind> kinds() {
  constexpr int64_t kPiece = kElements / kRanks;
  return {
      {"exchange",
       [](Communicator& group, Tensor source, Tensor target) {
         const Message send{(group.rank() + 1) % kRanks, source};
         const Message receive{(group.rank() + kRanks - 1) % kRanks, target};
         return group.exchange({&send, 1}, {&receive, 1}, "hop");
       },
       [](int rank, int turn, int64_t i) { return value((rank + kRanks - 1) % kRanks, turn, i); }},
      {"all_gather",
       [](Communicator& group, Tensor source, Tensor target) {
         return group.all_gather(source.slice(0, 0, kPiece), target, "gather");
       },
       [](int, int turn, int64_t i) { return value(static_cast<int>(i / kPiece), turn, i % kPiece); }},
      {"reduce_scatter",
       [](Communicator& group, Tensor source, Tensor target) {
         return group.reduce_scatter(source, target.slice(0, 0, kPiece), "scatter");
       },
       [](int rank, int turn, int64_t i) { return sum_at(turn, rank * kPiece + i); }, kPiece},
      {"all_to_all",
       [](Communicator& group, Tensor source, Tensor target) { return group.all_to_all(source, target, "transpose"); },
       [](int rank, int turn, int64_t i) {
         return value(static_cast<int>(i / kPiece), turn, rank * kPiece + i % kPiece);
       }},
      {"all_reduce", [](Communicator& group, Tensor source, Tensor) { return group.all_reduce(source, "sum"); },
       [](int, int turn, int64_t i) { return sum_at(turn, i); }, kElements, true}};
}

Tensor view(std::vector<float>& x) { return Tensor(x.data(), DType::f32, {std::ssize(x)}); }

void sleep_in(Queue& queue, int64_t microseconds) {
  queue.add([=] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); });
}

// In every turn another rank is late, before it fills its memory or before it starts the call; all reuse the same
// memory through their queues alone, and the threads never wait for them.
TEST(QueuedMover, LateQueuesNeitherGiveNorTakeWrongData) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    std::atomic<int64_t> wrong = 0;
    std::vector<std::vector<float>> sources(kRanks, std::vector<float>(kElements)), targets = sources;
    run([&](Rank& context) {
      const int rank = context.rank;
      std::vector<float>& source = sources[static_cast<size_t>(rank)];
      std::vector<float>& target = targets[static_cast<size_t>(rank)];
      for (int turn = 0; turn < 40; ++turn) {
        const bool late = turn % kRanks == rank;
        if (late && turn % 2 == 0) sleep_in(context.compute, 1000);
        context.compute.add([&source, rank, turn] {
          for (int64_t i = 0; i < kElements; ++i) source[static_cast<size_t>(i)] = value(rank, turn, i);
        });
        if (late && turn % 2 == 1) sleep_in(context.compute, 1000);
        Work work = kind.start(context.first, view(source), view(target));
        if (turn % 3 == 0) sleep_in(context.compute, 200);
        work.wait();
        context.compute.add([&, rank, turn] {
          const std::vector<float>& result = kind.in_place ? source : target;
          for (int64_t i = 0; i < kind.elements; ++i)
            if (result[static_cast<size_t>(i)] != kind.expected(rank, turn, i)) ++wrong;
        });
      }
    });
    EXPECT_EQ(wrong, 0);
  }
}

// Two calls of one group and one of another are open at a time, waited for in one order after the other. (Calls of one
// group may be waited for in another order on each rank.)
TEST(QueuedMover, OpenCallsOfTwoGroups) {
  std::atomic<int64_t> wrong = 0;
  std::vector<std::vector<std::vector<float>>> memory(
      kRanks, std::vector<std::vector<float>>(4, std::vector<float>(kElements)));
  const std::vector<Kind> all = kinds();
  run([&](Rank& context) {
    const int rank = context.rank;
    std::vector<std::vector<float>>& m = memory[static_cast<size_t>(rank)];
    for (int turn = 0; turn < 40; ++turn) {
      if (turn % kRanks == rank) sleep_in(context.compute, 500);
      context.compute.add([&m, rank, turn] {
        for (int64_t i = 0; i < kElements; ++i) m[0][static_cast<size_t>(i)] = value(rank, turn, i);
        std::copy(m[0].begin(), m[0].end(), m[3].begin());
      });
      Work hop = all[0].start(context.first, view(m[0]), view(m[1]));
      Work gather = all[1].start(context.first, view(m[0]), view(m[2]));
      Work sum = all[4].start(context.second, view(m[3]), {});
      Work* order[] = {&hop, &gather, &sum};
      if (rank % 2 == 1) std::swap(order[0], order[1]);
      std::rotate(order, order + turn % 2 * 2, order + 3);
      for (Work* work : order) work->wait();
      context.compute.add([&, rank, turn] {
        for (int64_t i = 0; i < kElements; ++i) {
          const auto at = static_cast<size_t>(i);
          if (m[1][at] != all[0].expected(rank, turn, i)) ++wrong;
          if (m[2][at] != all[1].expected(rank, turn, i)) ++wrong;
          if (m[3][at] != all[4].expected(rank, turn, i)) ++wrong;
        }
      });
    }
  });
  EXPECT_EQ(wrong, 0);
}

// A rank gives up a call and its memory goes, while the others' copies from it are still queued.
TEST(QueuedMover, MemoryIsNotReadAfterItsRankUnwound) {
  for (int turn = 0; turn < 20; ++turn) {
    try {
      run([&](Rank& context) {
        std::vector<float> part(10'000, 1), whole(40'000);
        if (context.rank == 1) sleep_in(context.compute, 500);
        // What the rank itself has queued is done before its memory goes.
        struct Drained {
          Queue& compute;
          ~Drained() { compute.record()->wait(); }
        } drained{context.compute};
        Work work = context.first.all_gather(view(part), view(whole), "gather");
        if (context.rank == 0) {
          for (int i = 0; i < turn; ++i) std::this_thread::yield();
          throw DataError("bad row");
        }
        work.wait();
        context.first.barrier("after");
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const DataError& error) {
      EXPECT_STREQ(error.what(), "bad row");
    }
  }
}

// The same of a call whose copies are all queued when the job fails, before anybody has waited for it.
TEST(QueuedMover, MemoryIsNotWrittenAfterACompleteCallWasGivenUp) {
  std::vector<std::vector<float>> wholes(kRanks, std::vector<float>(kElements)), given_up = wholes;
  std::barrier<> together(kRanks);
  try {
    run([&](Rank& context) {
      std::vector<float>& whole = wholes[static_cast<size_t>(context.rank)];
      std::vector<float> part(kElements / kRanks, 1), unmatched(kElements);
      if (context.rank == 1) sleep_in(context.compute, 100'000);
      if (context.rank == 0) together.arrive_and_wait();
      Work gather = context.first.all_gather(view(part), view(whole), "gather");
      if (context.rank != 0) together.arrive_and_wait();
      together.arrive_and_wait();  // rank 0 came last: all may receive
      if (context.rank == 0) {
        for (int i = 0; i < 2; ++i) together.arrive_and_wait();
        const Work dropped = std::move(gather);  // fails the job at once
        return;
      }
      // Calls that rank 0 does not make; each queues what is ready of the first: copies, then its end.
      std::vector<Work> others;
      for (int i = 0; i < 2; ++i) {
        others.push_back(context.first.all_gather(view(part), view(unmatched), "not of rank 0"));
        together.arrive_and_wait();
      }
      EXPECT_THROW(context.second.barrier("until rank 0 has failed"), PeerFailure);
      EXPECT_THROW(gather.wait(), PeerFailure);
      given_up[static_cast<size_t>(context.rank)] = whole;
      for (Work& other : others) EXPECT_THROW(other.wait(), PeerFailure);
      context.compute.record()->wait();
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const InternalError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("its Work was destroyed without a wait"));
  }
  for (int rank = 1; rank < kRanks; ++rank)
    EXPECT_EQ(given_up[static_cast<size_t>(rank)], wholes[static_cast<size_t>(rank)]) << rank;
}

}  // namespace
}  // namespace farspan
