// SPDX-License-Identifier: Apache-2.0
// Accelerator: what a device with its own memory and queues needs beyond a CPU. One rank's: its streams are its own,
// also where several ranks share one GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace farspan {

class Accelerator {
 public:
  virtual ~Accelerator() = default;

  // Throws MemoryError with the sizes asked for and free.
  virtual void* allocate(int64_t bytes) = 0;
  virtual void release(void* memory) noexcept = 0;

  // Ordered with the compute stream; `source` may be reused when it returns.
  virtual void copy_to_device(const void* source, void* target, int64_t bytes) = 0;
  // Waits for the compute stream.
  virtual void copy_to_host(const void* source, void* target, int64_t bytes) = 0;
  // Waits for all streams; throws InternalError with the first failure of any of the device's ops.
  virtual void synchronize() = 0;

  // A point in a stream of the device's, null being the compute stream. Marks of all streams are counted from 0 and
  // forgotten by forget_marks.
  virtual int64_t mark(void* stream) = 0;
  virtual double seconds_between(int64_t begin, int64_t end) = 0;  // waits for `end`
  virtual void forget_marks() = 0;

  virtual int index() const = 0;
  virtual std::string description() const = 0;  // "NVIDIA H200, 141 GB"
};

// GPUs that this process sees; 0 too where the program was built without CUDA.
int cuda_device_count();
// Why there is no GPU to use, in one clause; empty where there is one.
std::string cuda_absence();
// "NVIDIA H200", and "00000000:0D:00.0", by which the driver's own library knows it. Empty where there is no such GPU.
std::string cuda_device_name(int index);
std::string cuda_bus_id(int index);
// Its matrix units multiply 8-bit floats (compute capability 8.9).
bool cuda_has_fp8(int index);
// Free bytes of GPU `index` now.
int64_t cuda_free_bytes(int index);
// Makes GPU `index` the calling thread's.
std::unique_ptr<Accelerator> make_cuda_accelerator(int index);

}  // namespace farspan
