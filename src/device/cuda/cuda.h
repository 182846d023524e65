// SPDX-License-Identifier: Apache-2.0
// CUDA for the .cpp and .cu files of folders named cuda and nccl, which are built only where there is a toolkit.
#pragma once

#include <cuda_runtime.h>
#include <string>
#include <utility>

#include "base/error.h"
#include "device/device.h"

namespace farspan::cuda {

[[noreturn]] void throw_failure(cudaError_t status, const char* statement, const char* file, int line);

// FARSPAN_CUDA(cudaMalloc(&p, n)): throws InternalError with the statement, its place and CUDA's own words.
#define FARSPAN_CUDA(statement)                                                       \
  do {                                                                                \
    const cudaError_t farspan_status = (statement);                                   \
    if (farspan_status != cudaSuccess) [[unlikely]]                                   \
      ::farspan::cuda::throw_failure(farspan_status, #statement, __FILE__, __LINE__); \
  } while (false)

// After a kernel launch: a bad configuration is reported here, a failure inside the kernel by whatever waits for it.
#define FARSPAN_CUDA_LAUNCHED() FARSPAN_CUDA(cudaGetLastError())

class Stream {
 public:
  // Not ordered with the legacy default stream.
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }
  operator cudaStream_t() const { return stream_; }  // NOLINT: used wherever CUDA wants one

 private:
  cudaStream_t stream_ = nullptr;
};

// A point in a stream that others can wait for. Without timing.
class Event {
 public:
  Event();
  ~Event();
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  void record(cudaStream_t stream);
  void block(cudaStream_t stream) const;  // what is queued on `stream` later waits for this point
  bool reached() const;                   // throws InternalError when the device has failed
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// Of a device whose kind is cuda: where its ops are queued, and where its communication is.
cudaStream_t compute_stream(const Device& device);
cudaStream_t communication_stream(const Device& device);

// Properties that launches depend on, read once.
struct Properties {
  int multiprocessors = 0;
  int64_t l2_bytes = 0;
  int major = 0;
  int minor = 0;
};
const Properties& properties(const Device& device);

}  // namespace farspan::cuda
