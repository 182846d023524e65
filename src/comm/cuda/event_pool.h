// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mutex>
#include <utility>
#include <vector>

#include "device/cuda/cuda.h"

namespace farspan::cuda {

// Events that have been used once and can be recorded again: making one costs more than recording it. Any thread may
// give one back; only the thread of the GPU whose streams record them may take one.
class EventPool {
 public:
  Event take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return Event();
    Event event = std::move(free_.back());
    free_.pop_back();
    return event;
  }
  void give_back(Event event) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(event));
  }

 private:
  std::mutex mutex_;
  std::vector<Event> free_;
};

}  // namespace farspan::cuda
