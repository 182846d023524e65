// SPDX-License-Identifier: Apache-2.0
// Times ops on one GPU and prints each beside the rate at which the same GPU copies in the same run: 1 GiB, and as many
// bytes as the op moves, since a launch's beginning and end count for more the less there is between them. Bytes are
// those of the op's own cost: every operand once. An op runs on several sets of operands in turn, together far larger
// than the L2 cache, so that it finds nothing there. Plain programs: the benchmark library need not be where the GPU
// is.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "device/device.h"
#include "ops/elementwise.h"

namespace farspan {

constexpr int64_t kMemoryBytes = int64_t{8} << 30;
constexpr int64_t kSetsBytes = int64_t{600} << 20;  // ten times an H200's L2
constexpr double kWarmUpSeconds = 1;                // an idle GPU takes its time to raise its clocks
constexpr double kSecondsPerOp = 20e-3;

struct CostReader : OpObserver {
  void on_op(const OpCost& cost, OpTime) override {
    op = cost.op;
    bytes = cost.bytes;
  }
  std::string op;
  double bytes = 0;
};

class Bench {
 public:
  using Op = std::function<void()>;

  explicit Bench(std::string wanted) : wanted_(std::move(wanted)), memory_(device_, kMemoryBytes) {
    fill_memory();
    warm_up();
  }

  Device& device() { return device_; }

  // Uninitialised but for small random numbers, in f32 and bf16 alike. 16 bytes aligned.
  Tensor take(DType dtype, const Shape& shape) {
    const Tensor tensor(static_cast<char*>(memory_.data()) + used_, dtype, shape);
    used_ += (tensor.bytes() + 255) / 256 * 256;
    FARSPAN_CHECK(used_ <= kMemoryBytes, "the benchmark's memory holds {} bytes, {} asked for", kMemoryBytes, used_);
    return tensor;
  }

  // i32, the numbers given.
  Tensor ids(const std::vector<int32_t>& values) {
    const Tensor tensor = take(DType::i32, Shape{static_cast<int64_t>(values.size())});
    copy_to_device(device_, values.data(), tensor.raw(), tensor.bytes());
    return tensor;
  }

  Tensor positions(int64_t tokens) {
    const Tensor tensor = take(DType::i64, Shape{tokens});
    std::vector<int64_t> values;
    for (int64_t t = 0; t < tokens; ++t) values.push_back(t);
    copy_to_device(device_, values.data(), tensor.raw(), tensor.bytes());
    return tensor;
  }

  // First of all: what the ops are held against.
  void run_copies() {
    for (const int64_t bytes : {int64_t{1} << 30, int64_t{1} << 26})
      run("copy of " + std::to_string(bytes >> 20) + " MiB", [&] {
        const Tensor x = take(DType::u8, Shape{bytes}), y = take(DType::u8, Shape{bytes});
        return [this, x, y] { cast(device_, x, y); };
      });
  }

  // `make` takes operands and returns what runs on them.
  void run(const std::string& shape, const std::function<Op()>& make) {
    used_ = 0;
    std::vector<Op> ops{make()};
    CostReader cost;
    device_.observe(&cost);
    ops.front()();
    device_.report_timings();
    device_.observe(nullptr);
    if (cost.op.find(wanted_) == std::string::npos && cost.op != "cast") return;
    const int64_t set = used_;
    while (static_cast<int64_t>(ops.size()) * set < kSetsBytes && used_ + set <= kMemoryBytes) ops.push_back(make());
    const double seconds = seconds_per_call(ops);
    const double rate = cost.bytes / seconds;
    if (copy_rate_ == 0) copy_rate_ = rate;
    std::printf("%-26s %-34s %9.1f MB %9.1f us %7.0f GB/s %6.1f %%, of so large a copy %6.1f %%\n", cost.op.c_str(),
                shape.c_str(), cost.bytes * 1e-6, seconds * 1e6, rate * 1e-9, 100 * rate / copy_rate_,
                100 * rate / copy_rate_of(cost.bytes));
    std::fflush(stdout);
  }

 private:
  void fill_memory() {
    std::vector<BFloat16> values(int64_t{16} << 20);
    std::mt19937 bits(1);
    for (BFloat16& value : values) value = to_bfloat16(static_cast<float>(bits()) * 0x1p-31f - 1.0f);
    const int64_t piece = static_cast<int64_t>(values.size()) * 2;
    copy_to_device(device_, values.data(), memory_.data(), piece);
    for (int64_t filled = piece; filled < kMemoryBytes; filled *= 2)
      cast(device_, Tensor(memory_.data(), DType::u8, Shape{filled}),
           Tensor(static_cast<char*>(memory_.data()) + filled, DType::u8, Shape{filled}));
  }

  Tensor half(int64_t index) const {
    return {static_cast<char*>(memory_.data()) + index * kMemoryBytes / 2, DType::u8, Shape{kMemoryBytes / 2}};
  }

  void warm_up() {
    const auto start = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - start < std::chrono::duration<double>(kWarmUpSeconds)) {
      cast(device_, half(0), half(1));
      device_.synchronize();
    }
  }

  // Of a copy that reads and writes so many bytes, rounded to a mebibyte each way.
  double copy_rate_of(double bytes) {
    const int64_t mebibytes = std::clamp<int64_t>(static_cast<int64_t>(bytes / 2 / (1 << 20)), 1, 1024);
    double& rate = copy_rates_[mebibytes];
    if (rate > 0) return rate;
    const int64_t half_bytes = mebibytes << 20;
    used_ = 0;
    std::vector<Op> copies;
    do {
      const Tensor x = take(DType::u8, Shape{half_bytes}), y = take(DType::u8, Shape{half_bytes});
      copies.push_back([this, x, y] { cast(device_, x, y); });
    } while (used_ < kSetsBytes);
    return rate = 2 * static_cast<double>(half_bytes) / seconds_per_call(copies);
  }

  // By the clock on the wall, over enough calls that the first launch and the wait at the end do not count.
  double seconds_per_call(const std::vector<Op>& ops) {
    const auto seconds_of = [&](int64_t calls) {
      device_.synchronize();
      const auto start = std::chrono::steady_clock::now();
      for (int64_t i = 0; i < calls; ++i) ops[static_cast<size_t>(i) % ops.size()]();
      device_.synchronize();
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    constexpr int64_t kFirst = 20;
    int64_t calls = kFirst;
    double seconds = seconds_of(calls);
    for (const double wanted : {0.25 * kSecondsPerOp, kSecondsPerOp}) {
      calls = std::max(kFirst, static_cast<int64_t>(wanted * static_cast<double>(calls) / seconds));
      seconds = seconds_of(calls);
    }
    return seconds / static_cast<double>(calls);
  }

  std::string wanted_;
  Device device_{DeviceKind::cuda, 1};
  DeviceMemory memory_;
  int64_t used_ = 0;
  double copy_rate_ = 0;
  std::map<int64_t, double> copy_rates_;  // by mebibytes
};

}  // namespace farspan
