// SPDX-License-Identifier: Apache-2.0
// The device that a test of ops runs on: FARSPAN_TEST_DEVICE in the environment says cpu (as does nothing) or cuda.
// What an op reads or writes lies in memory of TestMemory, a plain one on the CPU; with cuda the GPU reaches it too,
// and the test waits (wait_for_test_device) before it looks at what an op wrote or changes what one reads.
#pragma once

#include <cstdlib>
#include <new>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "device/device.h"
#include "tests/cuda/managed_memory.h"

namespace farspan::test {

inline DeviceKind test_device_kind() {
  static const DeviceKind kind = [] {
    const char* const name = std::getenv("FARSPAN_TEST_DEVICE");
    if (name == nullptr || std::string_view(name) == "cpu") return DeviceKind::cpu;
    if (std::string_view(name) == "cuda") return DeviceKind::cuda;
    throw ConfigError(fmt::format("FARSPAN_TEST_DEVICE is {}, expected cpu or cuda", name));
  }();
  return kind;
}

inline bool testing_cuda() { return test_device_kind() == DeviceKind::cuda; }

inline void wait_for_test_device() {
  if (testing_cuda()) wait_for_gpu();
}

// A dry device that stands in for the one under test.
inline DryRun test_dry_run() { return {.of = test_device_kind()}; }

template <typename T>
struct TestMemory {
  using value_type = T;
  TestMemory() = default;
  template <typename Other>
  TestMemory(const TestMemory<Other>&) {}  // NOLINT: an allocator of one type is one of every type

  T* allocate(size_t count) {
    return static_cast<T*>(testing_cuda() ? allocate_managed(count * sizeof(T)) : ::operator new(count * sizeof(T)));
  }
  void deallocate(T* memory, size_t) noexcept {
    if (testing_cuda())
      release_managed(memory);
    else
      ::operator delete(memory);
  }
  template <typename Other>
  bool operator==(const TestMemory<Other>&) const {
    return true;
  }
};

template <typename T>
using TestVector = std::vector<T, TestMemory<T>>;

// A block of memory of which only what is touched costs anything.
class SparseMemory {
 public:
  explicit SparseMemory(int64_t bytes)
      : pages_(cpu_, testing_cuda() ? 0 : bytes),
        managed_(testing_cuda() ? allocate_managed(static_cast<size_t>(bytes)) : nullptr) {}
  ~SparseMemory() {
    if (managed_ != nullptr) release_managed(managed_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  void* data() const { return managed_ != nullptr ? managed_ : pages_.data(); }

 private:
  Device cpu_{DeviceKind::cpu, 1};
  DeviceMemory pages_;
  void* managed_;
};

}  // namespace farspan::test
