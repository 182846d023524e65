// SPDX-License-Identifier: Apache-2.0
#include "device/device.h"

#include <algorithm>
#include <chrono>
#include <cstring>
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

Device::Device(DeviceKind kind, int threads, int index)
    : kind_(kind), target_(kind == DeviceKind::dry ? DeviceKind::cpu : kind), threads_(threads) {
  FARSPAN_CHECK(threads >= 1, "device: {} threads", threads);
  if (kind == DeviceKind::cuda) accelerator_ = make_cuda_accelerator(index);
}

Device::Device(DryRun dry) : kind_(DeviceKind::dry), target_(dry.of), threads_(1) {
  FARSPAN_CHECK(dry.of != DeviceKind::dry, "device: a dry run of the dry device");
}

Device::~Device() {
  if (!accelerator_) return;
  try {
    accelerator_->synchronize();
  } catch (const Error&) {
    // What failed was, or will be, reported by whoever waited for it.
  }
  extensions_.clear();
  if (scratch_ != nullptr && !scratch_is_planned_) accelerator_->release(scratch_);
}

std::string_view Device::name() const {
  switch (kind_) {
    case DeviceKind::cpu:
      return "cpu";
    case DeviceKind::cuda:
      return "cuda";
    case DeviceKind::dry:
      return "dry";
  }
  throw InternalError("device: unknown kind");
}

void Device::need_scratch(const OpCost& cost) {
  FARSPAN_CHECK(!scratch_is_planned_, "{}: needs {} bytes of scratch, {} are planned", cost.op, cost.scratch_bytes,
                scratch_bytes_);
  if (on_cuda()) {
    accelerator_->synchronize();  // ops under way may still use the old one
    if (scratch_ != nullptr) accelerator_->release(std::exchange(scratch_, nullptr));
    scratch_ = accelerator_->allocate(cost.scratch_bytes);
  }
  scratch_bytes_ = cost.scratch_bytes;
}

void Device::use_scratch(void* memory, int64_t bytes) {
  if (scratch_ != nullptr && !scratch_is_planned_) {
    accelerator_->synchronize();
    accelerator_->release(scratch_);
  }
  scratch_ = memory;
  scratch_bytes_ = bytes;
  scratch_is_planned_ = true;
}

void Device::synchronize() {
  if (accelerator_) accelerator_->synchronize();
}

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

Device::Timing Device::begin_timing(Timing timing) {
  timing.report = reports_;
  if (!on_cuda()) {
    timing.begin_seconds = now();
    return timing;
  }
  if (!timing_) {  // mark 0, whose place on the clock is known since nothing is queued before it
    accelerator_->synchronize();
    timing_ = true;
    first_mark_seconds_ = now();
    accelerator_->mark(nullptr);
  }
  timing.begin = accelerator_->mark(timing.activity.stream);
  return timing;
}

void Device::end_timing(Timing timing) {
  if (on_cuda()) {
    timing.end = accelerator_->mark(timing.activity.stream);
    timings_.push_back(std::move(timing));
  } else {
    tell(timing, {timing.begin_seconds, now() - timing.begin_seconds});
  }
}

std::optional<Device::Timing> Device::begin_observed(const Activity& activity) {
  if (observer_ == nullptr || dry()) return std::nullopt;
  return begin_timing({.activity = activity, .label = std::string(activity.label), .is_op = false});
}

void Device::end_observed(std::optional<Timing> timing) {
  if (timing && observer_ != nullptr && timing->report == reports_) end_timing(std::move(*timing));
}

void Device::tell(Timing& timing, OpTime time) {
  timing.activity.label = timing.label;
  if (timing.is_op)
    observer_->on_op(timing.cost, time);
  else
    observer_->on_activity(timing.activity, time);
}

void Device::report_timings() {
  if (observer_ != nullptr)
    for (Timing& timing : timings_)
      tell(timing, {first_mark_seconds_ + accelerator_->seconds_between(0, timing.begin),
                    accelerator_->seconds_between(timing.begin, timing.end)});
  timings_.clear();
  timing_ = false;
  ++reports_;
  if (accelerator_) accelerator_->forget_marks();
}

void copy_to_device(Device& device, const void* source, void* target, int64_t bytes) {
  if (device.dry() || bytes == 0) return;
  device.run_observed({ActivityKind::copy, "to device", static_cast<double>(bytes)}, [&] {
    if (device.on_cuda())
      device.accelerator().copy_to_device(source, target, bytes);
    else
      std::memcpy(target, source, static_cast<size_t>(bytes));
  });
}

void copy_to_host(Device& device, const void* source, void* target, int64_t bytes) {
  if (device.dry() || bytes == 0) return;
  device.run_observed({ActivityKind::copy, "to host", static_cast<double>(bytes)}, [&] {
    if (device.on_cuda())
      device.accelerator().copy_to_host(source, target, bytes);
    else
      std::memcpy(target, source, static_cast<size_t>(bytes));
  });
}

DeviceMemory::DeviceMemory(const Device& device, int64_t bytes) : bytes_(round_up(bytes, kPage)), kind_(device.kind()) {
  if (bytes_ == 0) return;
  if (kind_ == DeviceKind::dry) {
    data_ = reinterpret_cast<void*>(kDryBase);
    return;
  }
  if (kind_ == DeviceKind::cuda) {
    accelerator_ = &device.accelerator();
    data_ = accelerator_->allocate(bytes_);
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
  if (data_ == nullptr) return;
  if (kind_ == DeviceKind::cpu) munmap(data_, static_cast<size_t>(bytes_));
  if (kind_ == DeviceKind::cuda) accelerator_->release(data_);
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      kind_(other.kind_),
      accelerator_(other.accelerator_) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(kind_, other.kind_);
  std::swap(accelerator_, other.accelerator_);
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
