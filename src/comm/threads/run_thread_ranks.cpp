// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <system_error>
#include <thread>

#include "comm/threads/thread_job.h"
#include "comm/threads/thread_world.h"

namespace farspan {
namespace {

using Body = std::function<void(int rank, ThreadWorld& world)>;

void run_rank(int rank, ThreadWorld& world, ThreadJob& job, const Body& body) {
  try {
    body(rank, world);
  } catch (const PeerFailure& error) {
    job.fail({rank, error.kind(), error.what(), true});
  } catch (const Error& error) {
    job.fail({rank, error.kind(), error.what()});
  } catch (const std::exception& error) {
    job.fail({rank, ErrorKind::internal, error.what()});
  } catch (...) {
    job.fail({rank, ErrorKind::internal, "an exception of unknown type"});
  }
  job.end(rank);
}

[[noreturn]] void rethrow(const RankFailure& failure) {
  const std::string message = fmt::format("rank {}: {}", failure.rank, failure.message);
  switch (failure.kind) {
    case ErrorKind::internal:
      throw InternalError(message);
    case ErrorKind::config:
      throw ConfigError(message);
    case ErrorKind::data:
      throw DataError(message);
    case ErrorKind::memory:
      throw MemoryError(message);
    case ErrorKind::communication:
      throw CommunicationError(message);
  }
  throw Error(failure.kind, message);
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

void run_thread_ranks(int size, double timeout_seconds, const Body& body, double grace_seconds) {
  ThreadWorld world(size, timeout_seconds);
  ThreadJob& job = *world.job_;
  std::vector<std::thread> threads;
  if (size == 1) {
    run_rank(0, world, job, body);
  } else {
    for (int rank = 0; rank < size; ++rank) {
      try {
        threads.emplace_back([&, rank] { run_rank(rank, world, job, body); });
      } catch (const std::system_error& error) {
        job.fail({rank, ErrorKind::internal, fmt::format("cannot start a thread: {}", error.what())});
        for (int absent = rank; absent < size; ++absent) job.end(absent);
        break;
      }
    }
    const std::vector<int> stuck = job.wait_for_ranks(grace_seconds);
    if (!stuck.empty()) end_process(*job.failure(), stuck, job, grace_seconds);
    for (std::thread& thread : threads) thread.join();
  }
  if (const std::optional<RankFailure> failure = job.failure()) rethrow(*failure);
}

}  // namespace farspan
