// SPDX-License-Identifier: Apache-2.0
#include "device/parallel_for.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <omp.h>

#include "base/math.h"

namespace farspan {
namespace {

// Keeps the first exception of a parallel region: OpenMP regions must not be left by one.
class FirstException {
 public:
  template <typename F>
  void guard(F&& f) {
    try {
      f();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!exception_) exception_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (exception_) std::rethrow_exception(exception_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr exception_;
};

}  // namespace

void parallel_for(const Device& device, int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (n <= 0) return;
  const int64_t pieces = std::clamp<int64_t>(n / std::max<int64_t>(1, grain), 1, device.threads());
  if (pieces == 1) {
    body(0, n);
    return;
  }
  FirstException first;
#pragma omp parallel for num_threads(static_cast <int>(pieces)) schedule(static, 1)
  for (int64_t piece = 0; piece < pieces; ++piece)
    first.guard([&] { body(n * piece / pieces, n * (piece + 1) / pieces); });
  first.rethrow();
}

int worthwhile_threads(const Device& device, double flops) {
  // 10 to 30 microseconds of a core's work, several times what threads take to meet on idle cores. On busy ones they
  // may wait a scheduler's turn of milliseconds for each other, which small products never win back.
  constexpr double kFlopsPerThread = 2e6;
  return static_cast<int>(std::clamp(flops / kFlopsPerThread, 1.0, static_cast<double>(device.threads())));
}

void parallel_tasks(int most_threads, int64_t n, const std::function<void(int64_t, int)>& body) {
  const int threads = static_cast<int>(std::min<int64_t>(most_threads, n));
  if (threads <= 1) {
    for (int64_t i = 0; i < n; ++i) body(i, 0);
    return;
  }
  FirstException first;
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
  first.guard([&] {
    for (int64_t i = next++; i < n; i = next++) body(i, omp_get_thread_num());
  });
  first.rethrow();
}

}  // namespace farspan
