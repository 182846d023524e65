// SPDX-License-Identifier: Apache-2.0
#include "comm/cuda/exposed_stream_time.h"

#include "device/cuda/cuda.h"

namespace farspan::cuda {
namespace {

// Intervals kept before the oldest are added up: more than a stream has queued at most times, so that they are over.
constexpr size_t kKeptIntervals = 1024;

}  // namespace

ExposedStreamTime::~ExposedStreamTime() {
  for (const auto& [begin, end] : intervals_) {
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
  }
  for (cudaEvent_t event : free_) cudaEventDestroy(event);
  if (begun_ != nullptr) cudaEventDestroy(begun_);
}

cudaEvent_t ExposedStreamTime::record() {
  cudaEvent_t event = nullptr;
  if (free_.empty()) {
    FARSPAN_CUDA(cudaEventCreate(&event));
  } else {
    event = free_.back();
    free_.pop_back();
  }
  FARSPAN_CUDA(cudaEventRecord(event, stream_));
  return event;
}

void ExposedStreamTime::begin() {
  while (intervals_.size() >= kKeptIntervals && cudaEventQuery(intervals_.front().second) == cudaSuccess) fold_oldest();
  static_cast<void>(cudaGetLastError());  // "not ready" is no error
  begun_ = record();
}

void ExposedStreamTime::end() { intervals_.emplace_back(std::exchange(begun_, nullptr), record()); }

double ExposedStreamTime::take_seconds() {
  if (!intervals_.empty()) FARSPAN_CUDA(cudaEventSynchronize(intervals_.back().second));
  while (!intervals_.empty()) fold_oldest();
  return std::exchange(seconds_, 0);
}

void ExposedStreamTime::fold_oldest() {
  const auto [begin, end] = intervals_.front();
  float milliseconds = 0;
  FARSPAN_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
  seconds_ += static_cast<double>(milliseconds) * 1e-3;
  intervals_.pop_front();
  free_.push_back(begin);
  free_.push_back(end);
}

}  // namespace farspan::cuda
