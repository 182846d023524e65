// SPDX-License-Identifier: Apache-2.0
// What the benchmarks of attention on a GPU share: the numbers that they run on, and for how long.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <vector>

#include "device/device.h"
#include "tensor/dtype.h"

namespace farspan {

// Small random bf16 values everywhere, so that tensor cores draw the power that they do on data.
class Noise {
 public:
  Noise() : values_(size_t{1} << 22) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (BFloat16& x : values_) x = to_bfloat16(normal(random));
  }
  void fill(Device& device, void* memory, int64_t bytes) const {
    const auto piece = static_cast<int64_t>(values_.size() * sizeof(BFloat16));
    for (int64_t begin = 0; begin < bytes; begin += piece)
      copy_to_device(device, values_.data(), static_cast<char*>(memory) + begin, std::min(piece, bytes - begin));
  }

 private:
  std::vector<BFloat16> values_;
};

// Of one run of `body`, which queues work on the device: the mean of as many as take `at_least` seconds.
template <typename Body>
double seconds_of(Device& device, double at_least, Body&& body) {
  const auto run = [&](int times) {
    device.synchronize();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < times; ++i) body();
    device.synchronize();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / times;
  };
  run(1);
  const double once = run(1);
  return run(std::max(2, static_cast<int>(at_least / once)));
}

}  // namespace farspan
