// SPDX-License-Identifier: Apache-2.0
// What the two GEMM benchmarks of a GPU share: the linear layers of two models, operands of random values (their bits
// decide the power that a product draws, and so its clock), and rates over a time long enough for the card to settle.
#pragma once

#include <algorithm>
#include <cstdint>
#include <fmt/format.h>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/philox.h"
#include "device/cuda/timed_event.h"
#include "tensor/dtype.h"

namespace farspan::bench {

struct LinearLayer {
  std::string name;
  int64_t in, out;
};

struct ModelShape {
  std::string name;
  int64_t hidden, query_heads, key_value_heads, head_size, feed_forward, vocabulary;

  std::vector<LinearLayer> layers() const {
    const int64_t heads = query_heads * head_size;
    return {{"qkv", hidden, heads + 2 * key_value_heads * head_size},
            {"attention_output", heads, hidden},
            {"gate_up", hidden, 2 * feed_forward},
            {"down", feed_forward, hidden}};
  }
  LinearLayer head() const { return {"head", hidden, vocabulary}; }
};

inline ModelShape model_named(const std::string& name) {
  for (const ModelShape& model : {ModelShape{"qwen3-1.7b", 2048, 16, 8, 128, 6144, 151936},
                                  ModelShape{"llama-3.2-1b", 2048, 32, 8, 64, 8192, 128256}})
    if (model.name == name) return model;
  throw ConfigError("model " + name + ": expected qwen3-1.7b or llama-3.2-1b");
}

// Device memory whose elements are `encode` of normal values. The pattern of 2^22 elements repeats.
template <typename Encode>
DeviceMemory random_memory(Device& device, int64_t elements, const Encode& encode) {
  using Element = decltype(encode(0.0));
  constexpr int64_t kPattern = int64_t{1} << 22;
  static const std::vector<Element> pattern = [&] {
    std::vector<Element> values;
    const Philox philox(7, "bench");
    for (int64_t i = 0; i < kPattern; ++i) values.push_back(encode(philox.normal(static_cast<uint64_t>(i))));
    return values;
  }();
  DeviceMemory memory(device, elements * static_cast<int64_t>(sizeof(Element)));
  int64_t filled = std::min(elements, kPattern);
  copy_to_device(device, pattern.data(), memory.data(), filled * static_cast<int64_t>(sizeof(Element)));
  auto* const data = static_cast<Element*>(memory.data());
  for (; filled < elements; filled *= 2)
    FARSPAN_CUDA(cudaMemcpyAsync(data + filled, data,
                                 static_cast<size_t>(std::min(filled, elements - filled)) * sizeof(Element),
                                 cudaMemcpyDeviceToDevice, cuda::compute_stream(device)));
  return memory;
}

struct Contender {
  Device* device;
  std::function<void()> queue;  // one run
};

// Seconds that one run of each takes while the card does nothing else, for `seconds` each in all: in turns, every other
// one in reverse, after a time in which the card leaves its burst of full clock.
inline std::vector<double> sustained_seconds(std::span<const Contender> contenders, double seconds) {
  constexpr int kTurns = 4;
  constexpr double kSettling = 0.15;
  std::vector<double> spent(contenders.size()), one(contenders.size());
  std::vector<int64_t> runs(contenders.size());
  cuda::TimedEvent begin, end;
  const auto timed = [&](size_t i, int64_t count) {
    const cudaStream_t stream = cuda::compute_stream(*contenders[i].device);
    begin.record(stream);
    for (int64_t run = 0; run < count; ++run) contenders[i].queue();
    end.record(stream);
    return static_cast<double>(end.milliseconds_since(begin)) * 1e-3;
  };
  for (size_t i = 0; i < contenders.size(); ++i) {
    timed(i, 1);
    one[i] = timed(i, 2) / 2;
  }
  timed(0, static_cast<int64_t>(kSettling / one[0]));
  for (int turn = 0; turn < kTurns; ++turn)
    for (size_t place = 0; place < contenders.size(); ++place) {
      const size_t i = turn % 2 == 0 ? place : contenders.size() - 1 - place;
      const int64_t count = std::max<int64_t>(1, static_cast<int64_t>(seconds / kTurns / one[i]));
      spent[i] += timed(i, count);
      runs[i] += count;
    }
  for (size_t i = 0; i < contenders.size(); ++i) spent[i] /= static_cast<double>(runs[i]);
  return spent;
}

}  // namespace farspan::bench
