// SPDX-License-Identifier: Apache-2.0
#include "device/device.h"

#include <algorithm>
#include <fstream>
#include <sched.h>
#include <string>
#include <sys/mman.h>
#include <thread>

#include "base/error.h"
#include "base/math.h"

namespace farspan {
namespace {

// Where the dry device's addresses start: not null, aligned, and far from anything mapped.
constexpr uintptr_t kDryBase = uintptr_t{1} << 56;

constexpr int64_t kPage = 4096;

// The first number in a small text file of the kernel's, or `otherwise`.
int64_t read_number(const char* path, int64_t otherwise) {
  std::ifstream file(path);
  int64_t value = 0;
  return file >> value ? value : otherwise;
}

}  // namespace

Device::Device(DeviceKind kind, int threads) : kind_(kind), threads_(threads) {
  FARSPAN_CHECK(threads >= 1, "device: {} threads", threads);
}

std::string_view Device::name() const { return kind_ == DeviceKind::cpu ? "cpu" : "dry"; }

DeviceMemory::DeviceMemory(const Device& device, int64_t bytes) : bytes_(round_up(bytes, kPage)), dry_(device.dry()) {
  if (bytes_ == 0) return;
  if (dry_) {
    data_ = reinterpret_cast<void*>(kDryBase);
    return;
  }
  void* mapped = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED)
    throw MemoryError(fmt::format("the system refused {} bytes of memory for one rank; {} are available", bytes_,
                                  available_memory_bytes()));
  data_ = mapped;
}

DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr && !dry_) munmap(data_, static_cast<size_t>(bytes_));
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)), dry_(other.dry_) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(dry_, other.dry_);
  return *this;
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int threads_per_rank(int ranks) { return std::max(1, usable_cores() / std::max(1, ranks)); }

namespace {

// "/a/b", or empty at the root or where groups are not of version 2.
std::string own_control_group() {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("0::/") && line.size() > 4) return line.substr(3);
  return {};
}

}  // namespace

int64_t available_memory_bytes() {
  int64_t available = INT64_MAX;
  std::ifstream meminfo("/proc/meminfo");
  std::string word;
  while (meminfo >> word) {
    int64_t kib = 0;
    if (word == "MemAvailable:" && meminfo >> kib) available = kib * 1024;
  }
  // Every control group above this process may set a limit (cgroup v2: one line "0::/a/b").
  std::string group = own_control_group();
  while (true) {
    const std::string folder = "/sys/fs/cgroup" + group;
    const int64_t limit = read_number((folder + "/memory.max").c_str(), INT64_MAX);
    if (limit != INT64_MAX)
      available = std::min(available, limit - read_number((folder + "/memory.current").c_str(), 0));
    if (group.empty()) break;
    group.resize(group.rfind('/'));
  }
  return std::max<int64_t>(0, available);
}

}  // namespace farspan
