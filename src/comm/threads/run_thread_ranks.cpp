// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <system_error>
#include <thread>

#include "base/log.h"
#include "comm/threads/thread_job.h"
#include "comm/threads/thread_world.h"

namespace farspan {
namespace {

void run_rank(int rank, ThreadWorld& world, ThreadJob& job, const RankBody& body) {
  try {
    body(rank, world);
  } catch (...) {
    job.fail(failure_of(rank, std::current_exception()));
  }
  job.end(rank);
}

// What the ranks did last, in the log.
void log_report(const ThreadJob& job) {
  constexpr int64_t kReportedOperations = 2;  // the call in hand and the one before it
  std::istringstream lines(job.report(kReportedOperations));
  for (std::string line; std::getline(lines, line);) log_info("{}", line);
}

// A thread can be neither stopped nor left behind with references to this frame: the process ends here.
[[noreturn]] void end_process(const RankFailure& failure, const std::vector<int>& stuck, const ThreadJob& job,
                              double grace_seconds) {
  std::string where;
  for (int rank : stuck)
    where += fmt::format("{}rank {} ({})", where.empty() ? "" : ", ", rank, job.recorder(rank).whereabouts());
  fmt::print(stderr, "farspan: error: rank {}: {}; did not stop within {} s after that: {}\n", failure.rank,
             failure.message, grace_seconds, where);
  std::fflush(stderr);
  std::_Exit(static_cast<int>(failure.kind));
}

}  // namespace

void run_thread_ranks(int size, double timeout_seconds, const RankBody& body, double grace_seconds,
                      GpuBackend backend) {
  ThreadWorld world(size, timeout_seconds, backend);
  ThreadJob& job = *world.job_;
  std::vector<std::thread> threads;
  if (size == 1) {
    run_rank(0, world, job, body);
  } else {
    for (int rank = 0; rank < size; ++rank) {
      try {
        threads.emplace_back([&, rank] { run_rank(rank, world, job, body); });
      } catch (const std::system_error& error) {
        job.fail({rank, ErrorKind::internal, fmt::format("cannot start a thread: {}", error.what()), false, {}, false});
        for (int absent = rank; absent < size; ++absent) job.end(absent);
        break;
      }
    }
    const std::vector<int> stuck = job.wait_for_ranks(grace_seconds);
    if (job.failed() && job.failure()->kind == ErrorKind::communication) log_report(job);
    if (!stuck.empty()) end_process(*job.failure(), stuck, job, grace_seconds);
    for (std::thread& thread : threads) thread.join();
  }
  if (const std::optional<RankFailure> failure = job.failure())
    throw_error(failure->kind, fmt::format("rank {}: {}", failure->rank, failure->message));
}

}  // namespace farspan
