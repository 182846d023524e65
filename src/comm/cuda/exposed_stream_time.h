// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>
#include <deque>
#include <utility>
#include <vector>

namespace farspan::cuda {

// How long a stream is held up by what it waits for: an event before the waits and one after. Where nothing holds it up
// an interval is the two events' own time, a microsecond or two.
class ExposedStreamTime {
 public:
  explicit ExposedStreamTime(cudaStream_t stream) : stream_(stream) {}
  ~ExposedStreamTime();
  ExposedStreamTime(const ExposedStreamTime&) = delete;
  ExposedStreamTime& operator=(const ExposedStreamTime&) = delete;

  // Around the waits.
  void begin();
  void end();

  // Seconds since the last call of this, up to the latest end(), which it waits for.
  double take_seconds();

 private:
  cudaEvent_t record();
  void fold_oldest();

  cudaStream_t stream_;
  cudaEvent_t begun_ = nullptr;
  std::deque<std::pair<cudaEvent_t, cudaEvent_t>> intervals_;
  std::vector<cudaEvent_t> free_;
  double seconds_ = 0;
};

}  // namespace farspan::cuda
