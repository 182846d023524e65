// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/nccl_watchdog.h"

#include <chrono>

#include "device/cuda/cuda.h"

namespace farspan {
namespace {

// Between two looks: a failed job ends within moments, and looking costs nothing to speak of.
constexpr std::chrono::milliseconds kInterval(20);

}  // namespace

NcclWatchdog::NcclWatchdog(Device& device) : thread_([this, gpu = device.accelerator().index()] { watch(gpu); }) {}

NcclWatchdog::~NcclWatchdog() {
  {
    const std::lock_guard lock(mutex_);
    end_ = true;
  }
  ended_.notify_one();
  thread_.join();
}

void NcclWatchdog::add(NcclConnection& connection, World& world, int world_rank) {
  const std::lock_guard lock(mutex_);
  watched_.push_back({&connection, &world, world_rank});
}

void NcclWatchdog::remove(const NcclConnection& connection) {
  const std::lock_guard lock(mutex_);
  std::erase_if(watched_, [&](const Watched& each) { return each.connection == &connection; });
}

void NcclWatchdog::watch(int gpu) {
  cudaSetDevice(gpu);
  std::unique_lock lock(mutex_);
  while (!ended_.wait_for(lock, kInterval, [this] { return end_; })) {
    for (const Watched& each : watched_) {
      if (!each.world->aborted())
        if (const std::optional<std::string> found = each.connection->trouble())
          each.world->abort(each.world_rank, *found);
      if (each.world->aborted()) each.connection->abort();
    }
  }
}

}  // namespace farspan
