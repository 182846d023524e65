// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/cuda/cuda.h"

namespace farspan::cuda {

// A point in a stream whose time can be told.
class TimedEvent {
 public:
  TimedEvent() { FARSPAN_CUDA(cudaEventCreate(&event_)); }
  ~TimedEvent() { cudaEventDestroy(event_); }
  TimedEvent(const TimedEvent&) = delete;
  TimedEvent& operator=(const TimedEvent&) = delete;
  void record(cudaStream_t stream) { FARSPAN_CUDA(cudaEventRecord(event_, stream)); }
  // Waits for this point.
  float milliseconds_since(const TimedEvent& begin) const {
    float milliseconds = 0;
    FARSPAN_CUDA(cudaEventSynchronize(event_));
    FARSPAN_CUDA(cudaEventElapsedTime(&milliseconds, begin.event_, event_));
    return milliseconds;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace farspan::cuda
