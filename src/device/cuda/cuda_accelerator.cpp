// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <vector>

#include "device/cuda/cuda.h"

namespace farspan {
namespace cuda {

void throw_failure(cudaError_t status, const char* statement, const char* file, int line) {
  throw InternalError(fmt::format("CUDA: {} ({}) in {} at {}:{}", cudaGetErrorString(status), cudaGetErrorName(status),
                                  statement, file, line));
}

Stream::Stream() { FARSPAN_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
Stream::~Stream() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

Event::Event() { FARSPAN_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
Event::~Event() {
  if (event_ != nullptr) cudaEventDestroy(event_);
}
void Event::record(cudaStream_t stream) { FARSPAN_CUDA(cudaEventRecord(event_, stream)); }
void Event::block(cudaStream_t stream) const { FARSPAN_CUDA(cudaStreamWaitEvent(stream, event_, 0)); }
bool Event::reached() const {
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  FARSPAN_CUDA(status);
  return true;
}

namespace {

// Host memory that the GPU can copy from while the CPU goes on.
class PinnedMemory {
 public:
  explicit PinnedMemory(int64_t bytes) { FARSPAN_CUDA(cudaMallocHost(&data_, static_cast<size_t>(bytes))); }
  ~PinnedMemory() {
    if (data_ != nullptr) cudaFreeHost(data_);
  }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
};

Properties read_properties(int index) {
  cudaDeviceProp p{};
  FARSPAN_CUDA(cudaGetDeviceProperties(&p, index));
  return {.multiprocessors = p.multiProcessorCount, .l2_bytes = p.l2CacheSize, .major = p.major, .minor = p.minor};
}

// Makes the GPU the thread's before anything else of the accelerator is made.
int selected(int index) {
  FARSPAN_CUDA(cudaSetDevice(index));
  return index;
}

class CudaAccelerator final : public Accelerator {
 public:
  explicit CudaAccelerator(int index)
      : index_(selected(index)),
        properties_(read_properties(index)),
        staging_{PinnedMemory(kStaging), PinnedMemory(kStaging)} {}

  ~CudaAccelerator() override {
    for (cudaEvent_t event : marks_) cudaEventDestroy(event);
  }

  void* allocate(int64_t bytes) override {
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, static_cast<size_t>(bytes));
    if (status == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      throw MemoryError(fmt::format("GPU {} refused {} bytes of memory for one rank; {} are free", index_, bytes,
                                    cuda_free_bytes(index_)));
    }
    FARSPAN_CUDA(status);
    return memory;
  }

  void release(void* memory) noexcept override { cudaFree(memory); }

  void copy_to_device(const void* source, void* target, int64_t bytes) override {
    for (int64_t begin = 0; begin < bytes; begin += kStaging) {
      const int64_t length = std::min(kStaging, bytes - begin);
      FARSPAN_CUDA(cudaEventSynchronize(staging_free_[turn_].get()));
      std::memcpy(staging_[turn_].data(), static_cast<const std::byte*>(source) + begin, static_cast<size_t>(length));
      FARSPAN_CUDA(cudaMemcpyAsync(static_cast<std::byte*>(target) + begin, staging_[turn_].data(),
                                   static_cast<size_t>(length), cudaMemcpyHostToDevice, compute_));
      staging_free_[turn_].record(compute_);
      turn_ = 1 - turn_;
    }
  }

  void copy_to_host(const void* source, void* target, int64_t bytes) override {
    if (bytes == 0) return;
    FARSPAN_CUDA(cudaMemcpyAsync(target, source, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, compute_));
    FARSPAN_CUDA(cudaStreamSynchronize(compute_));
  }

  void synchronize() override {
    FARSPAN_CUDA(cudaStreamSynchronize(compute_));
    FARSPAN_CUDA(cudaStreamSynchronize(communication_));
  }

  int64_t mark(void* stream) override {
    if (next_mark_ == marks_.size()) {
      cudaEvent_t event = nullptr;
      FARSPAN_CUDA(cudaEventCreate(&event));
      marks_.push_back(event);
    }
    FARSPAN_CUDA(
        cudaEventRecord(marks_[next_mark_], stream == nullptr ? compute_.get() : static_cast<cudaStream_t>(stream)));
    return static_cast<int64_t>(next_mark_++);
  }

  double seconds_between(int64_t begin, int64_t end) override {
    FARSPAN_CUDA(cudaEventSynchronize(marks_[static_cast<size_t>(end)]));
    float milliseconds = 0;
    FARSPAN_CUDA(
        cudaEventElapsedTime(&milliseconds, marks_[static_cast<size_t>(begin)], marks_[static_cast<size_t>(end)]));
    return static_cast<double>(milliseconds) * 1e-3;
  }

  void forget_marks() override { next_mark_ = 0; }

  int index() const override { return index_; }

  std::string description() const override {
    cudaDeviceProp p{};
    FARSPAN_CUDA(cudaGetDeviceProperties(&p, index_));
    return fmt::format("{}, {:.0f} GB", p.name, static_cast<double>(p.totalGlobalMem) * 1e-9);
  }

  const Stream& compute() const { return compute_; }
  const Stream& communication() const { return communication_; }
  const Properties& device_properties() const { return properties_; }

 private:
  static constexpr int64_t kStaging = int64_t{8} << 20;

  int index_;
  Properties properties_;
  Stream compute_;
  Stream communication_;
  PinnedMemory staging_[2];
  Event staging_free_[2];
  int turn_ = 0;
  std::vector<cudaEvent_t> marks_;
  size_t next_mark_ = 0;
};

const CudaAccelerator& of(const Device& device) { return static_cast<const CudaAccelerator&>(device.accelerator()); }

}  // namespace

cudaStream_t compute_stream(const Device& device) { return of(device).compute(); }
cudaStream_t communication_stream(const Device& device) { return of(device).communication(); }
const Properties& properties(const Device& device) { return of(device).device_properties(); }

}  // namespace cuda

int cuda_device_count() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess) return count;
  static_cast<void>(cudaGetLastError());
  return 0;
}

std::string cuda_absence() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  static_cast<void>(cudaGetLastError());
  if (status != cudaSuccess) return fmt::format("no GPU can be used: {}", cudaGetErrorString(status));
  return count > 0 ? "" : "this machine has no GPU";
}

std::string cuda_device_name(int index) {
  cudaDeviceProp p{};
  if (cudaGetDeviceProperties(&p, index) == cudaSuccess) return p.name;
  static_cast<void>(cudaGetLastError());
  return {};
}

std::string cuda_bus_id(int index) {
  char text[32] = {};
  if (cudaDeviceGetPCIBusId(text, sizeof(text), index) == cudaSuccess) return text;
  static_cast<void>(cudaGetLastError());
  return {};
}

bool cuda_has_fp8(int index) {
  cudaDeviceProp p{};
  if (cudaGetDeviceProperties(&p, index) == cudaSuccess) return 10 * p.major + p.minor >= 89;
  static_cast<void>(cudaGetLastError());
  return false;
}

int64_t cuda_free_bytes(int index) {
  size_t free = 0, total = 0;
  FARSPAN_CUDA(cudaSetDevice(index));
  FARSPAN_CUDA(cudaMemGetInfo(&free, &total));
  return static_cast<int64_t>(free);
}

std::unique_ptr<Accelerator> make_cuda_accelerator(int index) {
  const int count = cuda_device_count();
  if (count == 0) throw ConfigError("device cuda: " + cuda_absence() + "; use device cpu");
  if (index < 0 || index >= count)
    throw ConfigError(fmt::format("device cuda: GPU {} of {}; they are numbered 0 to {}", index, count, count - 1));
  return std::make_unique<cuda::CudaAccelerator>(index);
}

}  // namespace farspan
