// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/nccl/nccl_connection.h"
#include "comm/world.h"
#include "device/device.h"

namespace farspan {

// Watches a rank's connections from a thread of its own, which goes on when the rank's is held by the GPU: where one is
// in trouble it ends the job, and when the job has failed, for whatever reason, it aborts them all, so that no kernel
// goes on waiting for a rank that is gone. One for each GPU device (Device::extension).
class NcclWatchdog {
 public:
  explicit NcclWatchdog(Device& device);
  ~NcclWatchdog();
  NcclWatchdog(const NcclWatchdog&) = delete;
  NcclWatchdog& operator=(const NcclWatchdog&) = delete;

  // Both must be there until it is removed.
  void add(NcclConnection& connection, World& world, int world_rank);
  // The connection is not looked at any more when this returns.
  void remove(const NcclConnection& connection);

 private:
  struct Watched {
    NcclConnection* connection;
    World* world;
    int world_rank;
  };
  void watch(int gpu);

  std::mutex mutex_;
  std::condition_variable ended_;
  bool end_ = false;
  std::vector<Watched> watched_;
  std::thread thread_;
};

}  // namespace farspan
