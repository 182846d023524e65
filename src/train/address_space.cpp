// SPDX-License-Identifier: Apache-2.0
#include "train/address_space.h"

#include <algorithm>
#include <fstream>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/error.h"
#include "base/math.h"

namespace farspan {
namespace {

constexpr int64_t kHeapBytes = int64_t{64} << 20;      // that glibc reserves for each thread's own allocations
constexpr int64_t kLibraryBytes = int64_t{128} << 20;  // kernels that oneDNN makes, buffers of files and messages

int64_t stack_bytes() {
  pthread_attr_t defaults;
  size_t bytes = size_t{8} << 20;
  if (pthread_getattr_default_np(&defaults) != 0) return static_cast<int64_t>(bytes);
  pthread_attr_getstacksize(&defaults, &bytes);
  pthread_attr_destroy(&defaults);
  return static_cast<int64_t>(bytes);
}

}  // namespace

int64_t address_space_left() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur > static_cast<rlim_t>(INT64_MAX)) return INT64_MAX;
  int64_t pages = 0;  // mapped now
  std::ifstream("/proc/self/statm") >> pages;
  return std::max<int64_t>(0, static_cast<int64_t>(limit.rlim_cur) - pages * sysconf(_SC_PAGESIZE));
}

void check_address_space(int64_t planned_bytes, int64_t threads, int64_t left) {
  const int64_t reserved = checked_mul(threads, stack_bytes() + kHeapBytes) + kLibraryBytes;
  if (planned_bytes <= left && reserved <= left - planned_bytes) return;
  throw MemoryError(fmt::format(
      "the limit on this process's addresses (ulimit -v) leaves {} bytes, about {} are needed: {} planned, and {} that "
      "{} threads and the libraries reserve; raise the limit (ulimit -v unlimited), use fewer ranks or cores, or see "
      "what fits with farspan plan",
      left, planned_bytes + reserved, planned_bytes, reserved, threads));
}

}  // namespace farspan
