// SPDX-License-Identifier: Apache-2.0
// One block of attention on one GPU by every implementation that takes it, bf16, TFLOP/s counted on visible pairs only.
//
//   cuda_attention_bench [part of the cases' names] [seconds for each figure] [forward or backward: that alone]
//
// "alone": the block completes its results, which are written rounded to bf16. "added": it is one of several, added to
// an fp32 state or to fp32 gradients. A plain program: the benchmark library need not be where the GPU is.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "bench/cuda_attention_noise.h"
#include "device/device.h"
#include "ops/attention_implementation.h"

namespace farspan {
namespace {

struct Case {
  std::string name;
  int64_t tokens, heads, kv_heads, head_dim;
  std::vector<VisibleRun> runs;
  int64_t groups = 1;     // of heads, one call each: what the cores work on at a time shares more keys
  int64_t more_keys = 0;  // than queries

  int64_t keys() const { return tokens + more_keys; }
};

std::vector<VisibleRun> full_of(int64_t n, int64_t keys) { return {{.first = 0, .count = n, .lo = 0, .hi = keys}}; }
std::vector<VisibleRun> full(int64_t n) { return full_of(n, n); }

std::vector<VisibleRun> documents(int64_t n, int64_t length) {
  std::vector<VisibleRun> runs;
  for (int64_t begin = 0; begin < n; begin += length)
    runs.push_back({.first = begin, .count = std::min(length, n - begin), .lo = begin, .hi = begin + 1, .hi_step = 1});
  return runs;
}

// Of exponential lengths, as texts have.
std::vector<VisibleRun> mixed_documents(int64_t n, int64_t mean) {
  std::mt19937 random(11);
  std::exponential_distribution<double> length(1.0 / static_cast<double>(mean));
  std::vector<VisibleRun> runs;
  for (int64_t begin = 0; begin < n;) {
    const int64_t count = std::min(n - begin, 64 + static_cast<int64_t>(length(random)));
    runs.push_back({.first = begin, .count = count, .lo = begin, .hi = begin + 1, .hi_step = 1});
    begin += count;
  }
  return runs;
}

std::vector<VisibleRun> causal(int64_t n) { return documents(n, n); }

std::vector<VisibleRun> causal_behind(int64_t n, int64_t before) {
  return {{.first = 0, .count = n, .lo = 0, .hi = before + 1, .hi_step = 1}};
}

std::vector<VisibleRun> window(int64_t n, int64_t w) {
  return {{.first = 0, .count = w, .lo = 0, .hi = 1, .hi_step = 1},
          {.first = w, .count = n - w, .lo = 1, .hi = w + 1, .lo_step = 1, .hi_step = 1}};
}

// Tensors of a case in one allocation that was filled with small random bf16 values.
class Problem {
 public:
  Problem(Device& device, const Noise& noise, const Case& c) : case_(c), memory_(device, bytes_of(c)) {
    noise.fill(device, memory_.data(), memory_.bytes());
    block_ = {.query = take(DType::bf16, {c.tokens, c.heads, c.head_dim}),
              .key = take(DType::bf16, {c.keys(), c.kv_heads, c.head_dim}),
              .value = take(DType::bf16, {c.keys(), c.kv_heads, c.head_dim}),
              .lo = take(DType::i64, {c.tokens}),
              .hi = take(DType::i64, {c.tokens}),
              .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(c.head_dim))),
              .runs = c.runs};
    std::vector<int64_t> lo, hi;
    for (const VisibleRun& run : c.runs)
      for (int64_t i = 0; i < run.count; ++i) {
        lo.push_back(run.lo + i * run.lo_step);
        hi.push_back(run.hi + i * run.hi_step);
        pairs_ += static_cast<double>(hi.back() - lo.back());
      }
    block_.visible_pairs = static_cast<int64_t>(pairs_);
    copy_to_device(device, lo.data(), block_.lo.raw(), block_.lo.bytes());
    copy_to_device(device, hi.data(), block_.hi.raw(), block_.hi.bytes());
    lse_ = take(DType::f32, {c.heads, c.tokens});
    delta_ = take(DType::f32, {c.heads, c.tokens});
    d_out_ = take(DType::bf16, block_.query.shape());
    for (const DType dtype : {DType::bf16, DType::f32}) {
      out_.push_back(take(dtype, block_.query.shape()));
      d_query_.push_back(take(dtype, block_.query.shape()));
      d_key_.push_back(take(dtype, block_.key.shape()));
      d_value_.push_back(take(dtype, block_.key.shape()));
    }
  }

  // Forward's; backward takes 2.5 times as many.
  double flops() const { return 4 * pairs_ * static_cast<double>(case_.heads * case_.head_dim); }

  std::vector<AttentionForward> forward(bool added) const {
    std::vector<AttentionForward> calls;
    for (int64_t g = 0; g < case_.groups; ++g)
      calls.push_back(
          {block_of(g), added ? StateUse::add : StateUse::begin, heads_of(out_[added], g), rows_of(lse_, g)});
    return calls;
  }
  std::vector<AttentionBackward> backward(bool added) const {
    const Accumulate use = added ? Accumulate::yes : Accumulate::no;
    std::vector<AttentionBackward> calls;
    for (int64_t g = 0; g < case_.groups; ++g)
      calls.push_back({block_of(g), heads_of(out_[0], g), heads_of(d_out_, g), rows_of(lse_, g), rows_of(delta_, g),
                       use, use, heads_of(d_query_[added], g), heads_of(d_key_[added], g),
                       heads_of(d_value_[added], g)});
    return calls;
  }

 private:
  Tensor part(const Tensor& x, int dimension, int64_t group) const {
    const int64_t share = x.dim(dimension) / case_.groups;
    return x.slice(dimension, group * share, (group + 1) * share);
  }
  Tensor heads_of(const Tensor& x, int64_t group) const { return part(x, 1, group); }
  Tensor rows_of(const Tensor& x, int64_t group) const { return part(x, 0, group); }
  AttentionBlock block_of(int64_t group) const {
    AttentionBlock block = block_;
    block.query = heads_of(block_.query, group);
    block.key = heads_of(block_.key, group);
    block.value = heads_of(block_.value, group);
    return block;
  }

  static int64_t bytes_of(const Case& c) {
    return c.tokens * (c.head_dim * 16 * c.heads + 8 * c.heads + 16) + c.keys() * c.head_dim * 16 * c.kv_heads +
           16 * 256;
  }
  Tensor take(DType dtype, const Shape& shape) {
    const Tensor tensor(static_cast<char*>(memory_.data()) + used_, dtype, shape);
    used_ += (tensor.bytes() + 255) / 256 * 256;
    FARSPAN_CHECK(used_ <= memory_.bytes(), "bench: {} bytes of {} taken", used_, memory_.bytes());
    return tensor;
  }

  const Case& case_;
  DeviceMemory memory_;
  int64_t used_ = 0;
  double pairs_ = 0;
  AttentionBlock block_;
  Tensor lse_, delta_, d_out_;
  std::vector<Tensor> out_, d_query_, d_key_, d_value_;  // bf16, f32
};

// TFLOP/s of calls, one after the other, as text; why there are none if the implementation declines one.
template <typename Call>
std::string rate(Device& device, const std::vector<Call>& calls, double flops,
                 std::string (*declines)(Device&, const Call&), void (*body)(Device&, const Call&), double seconds) {
  const DeviceMemory scratch(device, std::max(int64_t{1}, scratch_bytes(device, calls[0])));
  device.use_scratch(scratch.data(), scratch.bytes());
  std::string text = declines(device, calls[0]);
  if (text.empty()) {
    const double took = seconds_of(device, seconds, [&] {
      for (const Call& call : calls) body(device, call);
    });
    char number[64];
    std::snprintf(number, sizeof number, "%4.0f", flops / took * 1e-12);
    text = number;
  }
  device.use_scratch(nullptr, 0);
  return text;
}

int run(const std::string& wanted, double seconds, const std::string& way) {
  Device device(DeviceKind::cuda, 1);
  const Noise noise;
  std::vector<Case> cases;
  for (const auto& [heads, kv_heads, head_dim] : {std::array<int64_t, 3>{16, 8, 128}, {32, 8, 64}, {8, 2, 256}}) {
    const std::string suffix = " hd" + std::to_string(head_dim);
    for (const int64_t n : {int64_t{8192}, int64_t{16384}}) {
      const std::string tokens = std::to_string(n / 1024) + "K";
      cases.push_back({"full " + tokens + suffix, n, heads, kv_heads, head_dim, full(n)});
      cases.push_back({"causal " + tokens + suffix, n, heads, kv_heads, head_dim, causal(n)});
    }
    cases.push_back({"window 4096 of 16K" + suffix, 16384, heads, kv_heads, head_dim, window(16384, 4096)});
    for (const int64_t length : {512, 1024, 8000})
      cases.push_back({"documents of " + std::to_string(length) + " in 32K" + suffix, 32768, heads, kv_heads, head_dim,
                       documents(32768, length)});
    for (const int64_t mean : {512, 1024, 2048, 8192})
      cases.push_back({"documents of " + std::to_string(mean) + " on average in 32K" + suffix, 32768, heads, kv_heads,
                       head_dim, mixed_documents(32768, mean)});
    for (const int64_t n : {int64_t{32768}, int64_t{131072}})
      for (int64_t groups = 1; groups <= (head_dim > 128 ? 1 : kv_heads); groups *= 2)
        cases.push_back({"long causal " + std::to_string(n / 1024) + "K" + suffix + " / " + std::to_string(groups), n,
                         heads, kv_heads, head_dim, causal(n), groups});
    if (head_dim > 128) continue;
    cases.push_back({"full 16K of 8K keys" + suffix, 16384, heads, kv_heads, head_dim, full_of(16384, 8192), 1, -8192});
    cases.push_back({"full 8K of 16K keys" + suffix, 8192, heads, kv_heads, head_dim, full_of(8192, 16384), 1, 8192});
    for (const int64_t n : {int64_t{8192}, int64_t{32768}})
      cases.push_back({"causal " + std::to_string(n / 1024) + "K behind as many" + suffix, n, heads, kv_heads, head_dim,
                       causal_behind(n, n), 1, n});
  }
  for (const Case& c : cases) {
    if (c.name.find(wanted) == std::string::npos) continue;
    const Problem problem(device, noise, c);
    for (const AttentionImplementation& how : attention_implementation_list(DeviceKind::cuda)) {
      std::string line;
      for (const bool added : {false, true}) {
        if (added && c.groups > 1) continue;
        line += std::string("  ") + (added ? "added:" : "alone:");
        if (way != "backward")
          line += " forward " +
                  rate(device, problem.forward(added), problem.flops(), how.forward_declines, how.forward, seconds);
        if (way != "forward")
          line += " backward " + rate(device, problem.backward(added), 2.5 * problem.flops(), how.backward_declines,
                                      how.backward, seconds);
      }
      std::printf("%-32s %-10s TFLOP/s%s\n", c.name.c_str(), std::string(how.name).c_str(), line.c_str());
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace
}  // namespace farspan

int main(int argc, char** argv) {
  return farspan::run(argc > 1 ? argv[1] : "", argc > 2 ? std::atof(argv[2]) : 0.3, argc > 3 ? argv[3] : "");
}
