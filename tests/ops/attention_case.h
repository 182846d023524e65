// SPDX-License-Identifier: Apache-2.0
// What the attention tests share: random problems in either dtype, masks by name, a dense fp64 oracle written apart
// from the code under test, and one call that runs an implementation over any cut of the keys into blocks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <gtest/gtest.h>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/philox.h"
#include "ops/attention.h"
#include "ops/attention_implementation.h"
#include "ops/cpu/attention_kernels.h"
#include "tests/device.h"

namespace farspan::test {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Sizes {
  int64_t n = 1, m = 1, heads = 1, kv_heads = 1, head_size = 8;
  std::string str() const {
    return fmt::format("n={} m={} heads={}:{} head_size={}", n, m, heads, kv_heads, head_size);
  }
};

struct Interval {
  int64_t lo = 0, hi = 0;
};

// The visible keys of each query.
using Mask = std::vector<Interval>;

inline Mask mask_from(int64_t n, const std::function<Interval(int64_t)>& rule) {
  Mask mask;
  for (int64_t i = 0; i < n; ++i) mask.push_back(rule(i));
  return mask;
}
inline Mask full(int64_t n, int64_t m) {
  return mask_from(n, [=](int64_t) { return Interval{0, m}; });
}
// The last query sees the last key, as when the queries are the last n positions of m.
inline Mask causal(int64_t n, int64_t m) {
  return mask_from(n, [=](int64_t i) { return Interval{0, std::max<int64_t>(0, m - n + i + 1)}; });
}
inline Mask window(int64_t n, int64_t size) {
  return mask_from(n, [=](int64_t i) { return Interval{std::max<int64_t>(0, i + 1 - size), i + 1}; });
}
// Causal inside each document.
inline Mask documents(const std::vector<int64_t>& lengths) {
  Mask mask;
  int64_t begin = 0;
  for (int64_t length : lengths) {
    for (int64_t i = 0; i < length; ++i) mask.push_back({begin, begin + i + 1});
    begin += length;
  }
  return mask;
}
inline Mask prefix(int64_t n, int64_t size) {
  return mask_from(n, [=](int64_t i) { return Interval{0, std::max(size, i + 1)}; });
}
// Causal, and every third query is padding; its interval is empty in one of the forms an interval can be.
inline Mask padded(int64_t n) {
  return mask_from(n, [=](int64_t i) {
    if (i % 3 != 2) return Interval{0, i + 1};
    return i % 2 == 0 ? Interval{0, 0} : Interval{i + 1, i};
  });
}
// No order at all: every query its own interval, some past the keys on either side.
inline Mask scattered(int64_t n, int64_t m) {
  const Philox random(7, "scattered");
  return mask_from(n, [&](int64_t i) {
    const auto at = [&](int64_t index) {
      return static_cast<int64_t>(random.uniform(static_cast<uint64_t>(index)) * static_cast<double>(m + 8)) - 4;
    };
    return Interval{at(2 * i), at(2 * i + 1)};
  });
}

inline int64_t visible_pairs(const Mask& mask, int64_t m) {
  int64_t pairs = 0;
  for (const Interval& v : mask) pairs += std::max<int64_t>(0, std::min(v.hi, m) - std::max<int64_t>(v.lo, 0));
  return pairs;
}

// Values kept as fp32; those of a bf16 problem are bf16 values. All row-major, (n, heads, D) or (m, kv_heads, D).
struct Problem {
  Sizes sizes;
  DType dtype = DType::f32;
  float scale = 1;
  Mask mask;
  TestVector<float> query, key, value, d_out;
  AttentionDropout dropout = {};
  int64_t origin = 0;       // row position of key 0; the mask counts from it
  int64_t query_begin = 0;  // row position of query 0

  // m_ij of ops/attention.h, spelt out.
  double kept(int64_t i, int64_t a, int64_t j) const {
    if (dropout.probability == 0) return 1;
    const Philox::Block head = Philox(dropout.key, static_cast<uint64_t>(dropout.row)).block(dropout.first_head + a);
    const uint64_t head_key = head[0] + (static_cast<uint64_t>(head[1]) << 32);
    const uint64_t position = static_cast<uint64_t>(origin + j);
    const uint32_t draw = Philox(head_key, static_cast<uint64_t>(query_begin + i)).block(position / 4)[position % 4];
    return draw < dropout.probability * 0x1p32 ? 0 : 1 / (1 - dropout.probability);
  }
};

inline TestVector<float> random_values(std::string_view name, int64_t count, DType dtype) {
  const Philox random(2024, name);
  TestVector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    const float x = static_cast<float>(random.normal(i));
    values[i] = dtype == DType::bf16 ? to_float(to_bfloat16(x)) : x;
  }
  return values;
}

inline Problem random_problem(const Sizes& s, const Mask& mask, DType dtype) {
  const int64_t q = s.n * s.heads * s.head_size;
  const int64_t k = s.m * s.kv_heads * s.head_size;
  return {s,
          dtype,
          static_cast<float>(1 / std::sqrt(static_cast<double>(s.head_size))),
          mask,
          random_values("query", q, dtype),
          random_values("key", k, dtype),
          random_values("value", k, dtype),
          random_values("d_out", q, dtype)};
}

// All queries zero and value of key t filled with t: out is the mean of the visible positions, lse the log of their
// number.
inline Problem uniform_probe(const Sizes& s, const Mask& mask, DType dtype) {
  Problem p = random_problem(s, mask, dtype);
  std::fill(p.query.begin(), p.query.end(), 0.0f);
  const int64_t row = s.kv_heads * s.head_size;
  for (size_t i = 0; i < p.value.size(); ++i) p.value[i] = static_cast<float>(static_cast<int64_t>(i) / row);
  return p;
}

template <typename Real>
struct Results {
  TestVector<Real> out, lse, d_query, d_key, d_value;  // shapes of ops/attention.h, row-major
};

// Softmax attention and its gradients, written out densely in fp64.
inline Results<double> oracle(const Problem& p) {
  const auto [n, m, heads, kv_heads, D] = p.sizes;
  const auto dot = [D = D](const float* x, const float* y) {
    double sum = 0;
    for (int64_t d = 0; d < D; ++d) sum += static_cast<double>(x[d]) * y[d];
    return sum;
  };
  Results<double> r;
  r.out.assign(p.query.size(), 0);
  r.d_query = r.out;
  r.d_key.assign(p.key.size(), 0);
  r.d_value = r.d_key;
  r.lse.assign(static_cast<size_t>(heads * n), -std::numeric_limits<double>::infinity());
  for (int64_t i = 0; i < n; ++i)
    for (int64_t a = 0; a < heads; ++a) {
      const int64_t lo = std::max<int64_t>(0, p.mask[static_cast<size_t>(i)].lo);
      const int64_t hi = std::min(m, p.mask[static_cast<size_t>(i)].hi);
      if (lo >= hi) continue;
      const int64_t row = (i * heads + a) * D;
      const auto kv_row = [&, heads = heads, kv_heads = kv_heads, D = D](int64_t j) {
        return (j * kv_heads + a / (heads / kv_heads)) * D;
      };
      std::vector<double> weight;
      double sum = 0;
      for (int64_t j = lo; j < hi; ++j) {
        weight.push_back(std::exp(p.scale * dot(&p.query[row], &p.key[kv_row(j)])));
        sum += weight.back();
      }
      r.lse[static_cast<size_t>(a * n + i)] = std::log(sum);
      double delta = 0;
      for (int64_t j = lo; j < hi; ++j) {
        weight[static_cast<size_t>(j - lo)] /= sum;
        const double w = weight[static_cast<size_t>(j - lo)];
        const double kept = p.kept(i, a, j);
        for (int64_t d = 0; d < D; ++d) r.out[row + d] += kept * w * p.value[kv_row(j) + d];
        delta += kept * w * dot(&p.d_out[row], &p.value[kv_row(j)]);
      }
      for (int64_t j = lo; j < hi; ++j) {
        const double w = weight[static_cast<size_t>(j - lo)];
        const double kept = p.kept(i, a, j);
        const double ds = p.scale * w * (kept * dot(&p.d_out[row], &p.value[kv_row(j)]) - delta);
        for (int64_t d = 0; d < D; ++d) {
          r.d_value[kv_row(j) + d] += kept * w * p.d_out[row + d];
          r.d_key[kv_row(j) + d] += ds * p.query[row + d];
          r.d_query[row + d] += ds * p.key[kv_row(j) + d];
        }
      }
    }
  return r;
}

// fp32 values stored in a problem's dtype.
class Stored {
 public:
  Stored(const TestVector<float>& values, DType dtype) : dtype_(dtype), f32_(values) {
    for (float x : values) bf16_.push_back(to_bfloat16(x));
  }
  Tensor tensor(Shape shape) {
    void* data = dtype_ == DType::f32 ? static_cast<void*>(f32_.data()) : bf16_.data();
    return {data, dtype_, shape};
  }

 private:
  DType dtype_;
  TestVector<float> f32_;
  TestVector<BFloat16> bf16_;
};

// Keys [begin, end) of a problem as one block.
struct KeySpan {
  int64_t begin = 0, end = 0;
};

inline std::vector<KeySpan> equal_blocks(int64_t m, int64_t blocks) {
  std::vector<KeySpan> spans;
  for (int64_t b = 0; b < blocks; ++b) spans.push_back({m * b / blocks, m * (b + 1) / blocks});
  return spans;
}

// AttentionBlock::runs of these intervals: as few as there can be.
inline std::vector<VisibleRun> runs_of(std::span<const int64_t> lo, std::span<const int64_t> hi) {
  std::vector<VisibleRun> runs;
  for (size_t i = 0; i < lo.size(); ++i) {
    if (!runs.empty()) {
      VisibleRun& run = runs.back();
      const int64_t lo_step = lo[i] - lo[i - 1], hi_step = hi[i] - hi[i - 1];
      const bool even = run.count == 1 ? (lo_step == 0 || lo_step == 1) && (hi_step == 0 || hi_step == 1)
                                       : lo_step == run.lo_step && hi_step == run.hi_step;
      if (even) {
        run.lo_step = static_cast<int>(lo_step);
        run.hi_step = static_cast<int>(hi_step);
        ++run.count;
        continue;
      }
    }
    runs.push_back({static_cast<int64_t>(i), 1, lo[i], hi[i], 0, 0});
  }
  return runs;
}

// A problem's tensors, in memory for as long as this lives.
class Tensors {
 public:
  explicit Tensors(const Problem& p)
      : sizes_(p.sizes),
        scale_(p.scale),
        dropout_(p.dropout),
        origin_(p.origin),
        query_begin_(p.query_begin),
        query_(p.query, p.dtype),
        key_(p.key, p.dtype),
        value_(p.value, p.dtype),
        d_out_(p.d_out, p.dtype) {
    for (const Interval& v : p.mask) {
      lo_.push_back(origin_ + v.lo);
      hi_.push_back(origin_ + v.hi);
    }
    runs_ = runs_of(lo_, hi_);
  }
  AttentionBlock block(KeySpan keys) {
    const Shape kv{sizes_.m, sizes_.kv_heads, sizes_.head_size};
    return {.query = query_.tensor({sizes_.n, sizes_.heads, sizes_.head_size}),
            .key = key_.tensor(kv).slice(0, keys.begin, keys.end),
            .value = value_.tensor(kv).slice(0, keys.begin, keys.end),
            .lo = {lo_.data(), DType::i64, {sizes_.n}},
            .hi = {hi_.data(), DType::i64, {sizes_.n}},
            .key_begin = origin_ + keys.begin,
            .query_begin = query_begin_,
            .scale = scale_,
            .runs = runs_,
            .dropout = dropout_};
  }
  Tensor d_out() { return d_out_.tensor({sizes_.n, sizes_.heads, sizes_.head_size}); }

 private:
  Sizes sizes_;
  float scale_;
  AttentionDropout dropout_;
  int64_t origin_, query_begin_;
  Stored query_, key_, value_, d_out_;
  TestVector<int64_t> lo_, hi_;
  std::vector<VisibleRun> runs_;
};

struct RunOptions {
  int threads = 1;
  std::vector<KeySpan> blocks = {};  // in the order attended to; empty: one block of all keys
};

inline Tensor f32_tensor(TestVector<float>& data, Shape shape) { return {data.data(), DType::f32, shape}; }

// The device under test, kept for as long as the program runs: a GPU's takes longer to make than most tests.
inline Device& test_device(int threads) {
  static auto* const devices = new std::map<int, std::unique_ptr<Device>>;
  std::unique_ptr<Device>& device = (*devices)[testing_cuda() ? 1 : threads];
  if (!device) device = std::make_unique<Device>(test_device_kind(), threads);
  return *device;
}

// Largest error of an output or a gradient over the tensor's largest magnitude. On the CPU all arithmetic is fp32 (unit
// roundoff 6e-8) whatever the input type, and sums over a few hundred terms of either sign lose a few units more; so it
// is on a GPU in fp32. In bf16 a GPU rounds weights and score gradients to 8 bits between two products.
inline double out_tolerance(DType dtype) { return testing_cuda() && dtype == DType::bf16 ? 5e-3 : 1e-6; }
inline double gradient_tolerance(DType dtype) { return testing_cuda() && dtype == DType::bf16 ? 1.2e-2 : 3e-6; }
inline constexpr double kLseTolerance = 1e-6;

// Runs one implementation as the op does: with the scratch that it may use.
inline void attend_with(const AttentionImplementation& implementation, Device& device, const AttentionForward& call) {
  device.run({"attention_block_forward", OpClass::attention, 0, 0, scratch_bytes(device, call)},
             [&] { implementation.forward(device, call); });
}
inline void attend_with(const AttentionImplementation& implementation, Device& device, const AttentionBackward& call) {
  device.run({"attention_block_backward", OpClass::attention, 0, 0, scratch_bytes(device, call)},
             [&] { implementation.backward(device, call); });
}

inline void run_forward(const AttentionImplementation& implementation, const Problem& p, const RunOptions& options,
                        Results<float>& r) {
  const auto [n, m, heads, kv_heads, D] = p.sizes;
  Device& device = test_device(options.threads);
  Tensors tensors(p);
  r.out.assign(p.query.size(), kNaN);
  r.lse.assign(static_cast<size_t>(heads * n), kNaN);
  const Tensor out = f32_tensor(r.out, {n, heads, D});
  const Tensor lse = f32_tensor(r.lse, {heads, n});
  attention_state_init(device, out, lse);
  for (KeySpan keys : options.blocks.empty() ? equal_blocks(m, 1) : options.blocks)
    attend_with(implementation, device, AttentionForward{tensors.block(keys), StateUse::add, out, lse});
  device.synchronize();
}

// Gradients from the out and lse already in `r`.
inline void run_backward(const AttentionImplementation& implementation, const Problem& p, const RunOptions& options,
                         Results<float>& r) {
  const auto [n, m, heads, kv_heads, D] = p.sizes;
  Device& device = test_device(options.threads);
  Tensors tensors(p);
  TestVector<float> delta(r.lse.size());
  const Tensor delta_tensor = f32_tensor(delta, {heads, n});
  attention_delta(device, f32_tensor(r.out, {n, heads, D}), tensors.d_out(), delta_tensor);
  r.d_query.assign(p.query.size(), 0);
  r.d_key.assign(p.key.size(), 0);
  r.d_value.assign(p.value.size(), 0);
  const Shape kv{m, kv_heads, D};
  for (KeySpan keys : options.blocks.empty() ? equal_blocks(m, 1) : options.blocks)
    attend_with(implementation, device,
                AttentionBackward{.block = tensors.block(keys),
                                  .out = {},
                                  .d_out = tensors.d_out(),
                                  .lse = f32_tensor(r.lse, {heads, n}),
                                  .delta = delta_tensor,
                                  .d_query = f32_tensor(r.d_query, {n, heads, D}),
                                  .d_key = f32_tensor(r.d_key, kv).slice(0, keys.begin, keys.end),
                                  .d_value = f32_tensor(r.d_value, kv).slice(0, keys.begin, keys.end)});
  device.synchronize();
}

inline Results<float> run(const AttentionImplementation& implementation, const Problem& p,
                          const RunOptions& options = {}) {
  Results<float> r;
  run_forward(implementation, p, options, r);
  run_backward(implementation, p, options, r);
  return r;
}

// Largest difference over the largest expected magnitude; equal infinities differ by nothing. NaN when any value is
// NaN.
inline double relative_error(const TestVector<float>& found, const TestVector<double>& expected) {
  double signal = 0;
  for (double x : expected)
    if (std::isfinite(x)) signal = std::max(signal, std::abs(x));
  double worst = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    if (static_cast<double>(found[i]) == expected[i]) continue;
    const double difference = std::abs(found[i] - expected[i]);
    if (std::isnan(difference)) return difference;
    worst = std::max(worst, difference);
  }
  return signal > 0 ? worst / signal : worst;
}

// One implementation that takes every mask, in one type, on one instruction set of those compiled in that this machine
// has. cuDNN, which takes some, has tests of its own.
struct AttentionVariant {
  const AttentionImplementation* implementation;
  DType dtype;
  std::string target;  // empty: implementation without a choice
};

inline void PrintTo(const AttentionVariant& v, std::ostream* os) {
  *os << v.implementation->name << ' ' << v.target << ' ' << name_of(v.dtype);
}

inline std::vector<AttentionVariant> attention_variants() {
  std::vector<AttentionVariant> all;
  for (const AttentionImplementation& implementation : attention_implementation_list(test_device_kind())) {
    if (implementation.name == "cudnn") continue;
    for (DType dtype : {DType::f32, DType::bf16}) {
      const bool vector = implementation.name == "vector";
      for (const std::string& target : vector ? cpu::attention_kernel_targets() : std::vector<std::string>{""})
        all.push_back({&implementation, dtype, target});
    }
  }
  return all;
}

inline std::string attention_variant_name(const ::testing::TestParamInfo<AttentionVariant>& info) {
  const AttentionVariant& v = info.param;
  return std::string(v.implementation->name) + (v.target.empty() ? "" : "_" + v.target) + "_" +
         std::string(name_of(v.dtype));
}

class AttentionTest : public ::testing::TestWithParam<AttentionVariant> {
 protected:
  void SetUp() override { cpu::attention_kernel_select(GetParam().target); }
  void TearDown() override { cpu::attention_kernel_select(""); }
  const AttentionImplementation& implementation() const { return *GetParam().implementation; }
  DType dtype() const { return GetParam().dtype; }
};

}  // namespace farspan::test
