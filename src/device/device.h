// SPDX-License-Identifier: Apache-2.0
// Device: where a rank's maths runs and where its memory lives. An op is written as checks + cost + one body per
// device:
//
//   device.run({"rms_norm_forward", OpClass::memory, flops, bytes}, [&] { cpu::rms_norm_forward(...); });
//
// The dry device computes nothing: run() only reports the cost, and memory it hands out is an address range that is
// never touched. The same model code therefore runs on it, and what it would do can be planned before anything is
// allocated.
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>
#include <utility>

namespace farspan {

enum class DeviceKind { cpu, dry };

// What bounds an op: matrix units, the attention kernels, or memory traffic.
enum class OpClass { gemm, attention, memory };

struct OpCost {
  std::string_view op;  // a literal: "gemm", "rms_norm_forward", ...
  OpClass op_class = OpClass::memory;
  double flops = 0;  // multiply and add counted apart; attention counts visible (query, key) pairs only
  double bytes = 0;  // read plus written, each operand once
};

// Sees every op a device runs. `seconds` is 0 on the dry device.
class OpObserver {
 public:
  virtual ~OpObserver() = default;
  virtual void on_op(const OpCost& cost, double seconds) = 0;
};

// One rank's device. Used by that rank's thread only.
class Device {
 public:
  // `threads`: CPU threads that one op of this rank may use (at least 1; ignored by the dry device).
  Device(DeviceKind kind, int threads);
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  DeviceKind kind() const { return kind_; }
  bool dry() const { return kind_ == DeviceKind::dry; }
  int threads() const { return threads_; }
  std::string_view name() const;

  // At most one observer; null removes it. The observer must outlive its use.
  void observe(OpObserver* observer) { observer_ = observer; }

  template <typename Body>
  void run(const OpCost& cost, Body&& body) {
    if (observer_ == nullptr) {
      if (!dry()) std::forward<Body>(body)();
      return;
    }
    double seconds = 0;
    if (!dry()) {
      const auto start = std::chrono::steady_clock::now();
      std::forward<Body>(body)();
      seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    observer_->on_op(cost, seconds);
  }

 private:
  DeviceKind kind_;
  int threads_;
  OpObserver* observer_ = nullptr;
};

// One block of a device's memory, given back on destruction. CPU: zero-filled pages that cost nothing until touched;
// dry: addresses only. Throws MemoryError with the size when the system refuses.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const Device& device, int64_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  bool dry_ = false;
};

// Cores this process may run on (its CPU affinity).
int usable_cores();

// Threads that an op of each of `ranks` thread ranks may use, so that all together use the machine's cores once.
int threads_per_rank(int ranks);

// Bytes of memory of this machine that a process could still take (MemAvailable; the cgroup's limit when lower).
int64_t available_memory_bytes();

}  // namespace farspan
