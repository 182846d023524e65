// SPDX-License-Identifier: Apache-2.0
// Ops against the machine, each pair timed in turn within one run, so that both meet the same clock and the same
// neighbours: matrix products beside a bare oneDNN call, memory-bound ops beside a memcpy that moves as many bytes.
//
// Counters are medians over the iterations. FLOP/s and bytes/s are the op's; "bare" and "memcpy" the yardstick's; ratio
// is op / yardstick. The last argument of a benchmark is the number of threads.
#include <algorithm>
#include <benchmark/benchmark.h>
#include <chrono>
#include <cstring>
#include <memory>
#include <omp.h>
#include <oneapi/dnnl/dnnl.hpp>
#include <vector>

#include "device/parallel_for.h"
#include "ops/cross_entropy.h"
#include "ops/elementwise.h"
#include "ops/gemm.h"
#include "ops/optimizer_step.h"
#include "ops/rms_norm.h"
#include "ops/swiglu.h"

namespace farspan {
namespace {

double seconds_of(const auto& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Memory of its own, holding small numbers.
class Operand {
 public:
  Operand(const Device& device, DType dtype, const Shape& shape)
      : memory_(device, shape.numel() * size_of(dtype)), tensor_(memory_.data(), dtype, shape) {
    for (int64_t i = 0; i < shape.numel(); ++i) {
      const float value = 0.01f * static_cast<float>(i * 37 % 101 - 50);
      if (dtype == DType::f32) tensor_.data<float>()[i] = value;
      if (dtype == DType::bf16) tensor_.data<BFloat16>()[i] = to_bfloat16(value);
      if (dtype == DType::i32) tensor_.data<int32_t>()[i] = static_cast<int32_t>(i * 37 % 101);
    }
  }
  operator const Tensor&() const { return tensor_; }  // NOLINT: used wherever a tensor is
  const Tensor& tensor() const { return tensor_; }

 private:
  DeviceMemory memory_;
  Tensor tensor_;
};

// y (m, n) = x (m, k) w (n, k)^T as a caller would write it against the library alone.
class BareProduct {
 public:
  BareProduct(int64_t m, int64_t n, int64_t k, DType dtype, DType result, void* x, void* w, void* y) {
    using Memory = dnnl::memory;
    const auto type = [](DType t) { return t == DType::bf16 ? Memory::data_type::bf16 : Memory::data_type::f32; };
    const Memory::desc a({m, k}, type(dtype), Memory::dims{k, 1}), b({k, n}, type(dtype), Memory::dims{1, k});
    const Memory::desc c({m, n}, type(result), Memory::dims{n, 1});
#if DNNL_VERSION_MAJOR >= 3
    const dnnl::matmul::primitive_desc chosen(engine_, a, b, c, dnnl::primitive_attr(), true);
#else
    const dnnl::matmul::primitive_desc chosen(dnnl::matmul::desc(a, b, c), dnnl::primitive_attr(), engine_, true);
#endif
    if (!chosen) return;
    primitive_ = std::make_unique<dnnl::matmul>(chosen);
    arguments_ = {{DNNL_ARG_SRC, Memory(a, engine_, x)},
                  {DNNL_ARG_WEIGHTS, Memory(b, engine_, w)},
                  {DNNL_ARG_DST, Memory(c, engine_, y)}};
  }
  bool supported() const { return primitive_ != nullptr; }
  void run() {
    primitive_->execute(stream_, arguments_);
    stream_.wait();
  }

 private:
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  std::unique_ptr<dnnl::matmul> primitive_;
  std::unordered_map<int, dnnl::memory> arguments_;
};

// Arguments: m, n, k, threads. Where the library has no bf16 the yardstick is its f32 product of the same sizes.
void linear(benchmark::State& state, DType dtype) {
  const int64_t m = state.range(0), n = state.range(1), k = state.range(2);
  Device device(DeviceKind::cpu, static_cast<int>(state.range(3)));
  omp_set_num_threads(device.threads());
  const Operand x(device, dtype, Shape{m, k}), w(device, dtype, Shape{n, k}), y(device, dtype, Shape{m, n});
  const Operand x32(device, DType::f32, Shape{m, k}), w32(device, DType::f32, Shape{n, k}),
      y32(device, DType::f32, Shape{m, n});
  BareProduct bare(m, n, k, dtype, dtype, x.tensor().raw(), w.tensor().raw(), y.tensor().raw());
  const bool same_type = bare.supported();
  if (!same_type)
    bare = BareProduct(m, n, k, DType::f32, DType::f32, x32.tensor().raw(), w32.tensor().raw(), y32.tensor().raw());
  linear_forward(device, x, w, y);
  bare.run();
  std::vector<double> ours, theirs;
  for (auto _ : state) {
    ours.push_back(seconds_of([&] { linear_forward(device, x, w, y); }));
    theirs.push_back(seconds_of([&] { bare.run(); }));
    state.SetIterationTime(ours.back());
  }
  const double flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  state.counters["FLOP/s"] = flops / median(ours);
  state.counters[same_type ? "bare_FLOP/s" : "bare_f32_FLOP/s"] = flops / median(theirs);
  state.counters["ratio"] = median(theirs) / median(ours);
}

void linear_sizes(benchmark::internal::Benchmark* benchmark) {
  for (const int64_t threads : {1, 2}) {
    for (const int64_t edge : {512, 1024, 2048}) benchmark->Args({edge, edge, edge, threads});
    // 12 layers of width 768 at 2048 tokens: fused QKV, output, gate and up, down, vocabulary (a tile of the loss).
    benchmark->Args({2048, 2304, 768, threads})->Args({2048, 768, 768, threads})->Args({2048, 4096, 768, threads});
    benchmark->Args({2048, 768, 2048, threads})->Args({256, 50304, 768, threads});
  }
  benchmark->UseManualTime()->Unit(benchmark::kMillisecond)->MinTime(0.2);
}
BENCHMARK_CAPTURE(linear, f32, DType::f32)->Apply(linear_sizes);
BENCHMARK_CAPTURE(linear, bf16, DType::bf16)->Apply(linear_sizes);

// `bytes`: what the op must move, each operand once. The memcpy reads half and writes half of as many.
template <typename Op>
void beside_memcpy(benchmark::State& state, const Device& device, double bytes, const Op& op) {
  const int64_t half = static_cast<int64_t>(bytes / 2);
  const DeviceMemory from(device, half), to(device, half);
  std::memset(from.data(), 1, static_cast<size_t>(half));
  const auto copy = [&] {
    parallel_for(device, half, 1 << 16, [&](int64_t begin, int64_t end) {
      std::memcpy(static_cast<char*>(to.data()) + begin, static_cast<char*>(from.data()) + begin,
                  static_cast<size_t>(end - begin));
    });
  };
  op();
  copy();
  std::vector<double> ours, theirs;
  for (auto _ : state) {
    ours.push_back(seconds_of(op));
    theirs.push_back(seconds_of(copy));
    state.SetIterationTime(ours.back());
  }
  const auto rate = [&](const std::vector<double>& times) { return bytes / median(times) / 1e9; };
  state.counters["GB/s"] = rate(ours);
  state.counters["memcpy_GB/s"] = rate(theirs);
  state.counters["ratio"] = rate(ours) / rate(theirs);
}

double element_bytes(DType dtype, int64_t elements) { return static_cast<double>(elements * size_of(dtype)); }

constexpr int64_t kTokens = 4096, kHidden = 2048, kVocabulary = 50304, kLossTokens = 256;

void rms_norm(benchmark::State& state, DType dtype) {
  Device device(DeviceKind::cpu, static_cast<int>(state.range(0)));
  const Shape shape{kTokens, kHidden};
  const Operand x(device, dtype, shape), y(device, dtype, shape), weight(device, dtype, Shape{kHidden});
  const Operand rstd(device, DType::f32, Shape{kTokens});
  beside_memcpy(state, device, 2 * element_bytes(dtype, kTokens * kHidden),
                [&] { rms_norm_forward(device, x, weight, 1e-5, y, rstd); });
}

void rms_norm_gradient(benchmark::State& state, DType dtype) {
  Device device(DeviceKind::cpu, static_cast<int>(state.range(0)));
  const Shape shape{kTokens, kHidden};
  const Operand x(device, dtype, shape), d_y(device, dtype, shape), d_x(device, dtype, shape);
  const Operand weight(device, dtype, Shape{kHidden}), d_weight(device, DType::f32, Shape{kHidden});
  const Operand rstd(device, DType::f32, Shape{kTokens});
  beside_memcpy(state, device, 3 * element_bytes(dtype, kTokens * kHidden),
                [&] { rms_norm_backward(device, d_y, x, weight, rstd, d_x, Accumulate::no, d_weight); });
}

void swiglu(benchmark::State& state, DType dtype) {
  Device device(DeviceKind::cpu, static_cast<int>(state.range(0)));
  const Operand gate_up(device, dtype, Shape{kTokens, 2 * kHidden}), y(device, dtype, Shape{kTokens, kHidden});
  beside_memcpy(state, device, 3 * element_bytes(dtype, kTokens * kHidden),
                [&] { swiglu_forward(device, gate_up, y); });
}

void swiglu_gradient(benchmark::State& state, DType dtype) {
  Device device(DeviceKind::cpu, static_cast<int>(state.range(0)));
  const Operand gate_up(device, dtype, Shape{kTokens, 2 * kHidden}), d_y(device, dtype, Shape{kTokens, kHidden});
  const Operand d_gate_up(device, dtype, Shape{kTokens, 2 * kHidden});
  beside_memcpy(state, device, 5 * element_bytes(dtype, kTokens * kHidden),
                [&] { swiglu_backward(device, gate_up, d_y, d_gate_up); });
}

// The dtype is the gradient's.
void loss_and_gradient(benchmark::State& state, DType dtype) {
  Device device(DeviceKind::cpu, static_cast<int>(state.range(0)));
  const Shape shape{kLossTokens, kVocabulary};
  const Operand logits(device, DType::f32, shape), d_logits(device, dtype, shape);
  const Operand targets(device, DType::i32, Shape{kLossTokens}), loss(device, DType::f32, Shape{kLossTokens});
  const double bytes = element_bytes(DType::f32, shape.numel()) + element_bytes(dtype, shape.numel());
  beside_memcpy(state, device, bytes, [&] { cross_entropy(device, logits, targets, 1e-3, loss, d_logits); });
}

void adamw(benchmark::State& state) {
  Device device(DeviceKind::cpu, static_cast<int>(state.range(0)));
  const Shape shape{int64_t{1} << 23};
  const Operand gradient(device, DType::f32, shape), weight(device, DType::f32, shape), m(device, DType::f32, shape);
  const Operand v(device, DType::f32, shape), copy(device, DType::bf16, shape);
  fill(device, v, 0.5);  // a second moment is not negative
  beside_memcpy(state, device, 30.0 * static_cast<double>(shape.numel()),
                [&] { adamw_step(device, {.lr = 1e-4, .weight_decay = 0.1}, gradient, weight, m, v, copy); });
}

void threads(benchmark::internal::Benchmark* benchmark) {
  benchmark->Arg(1)->Arg(2)->UseManualTime()->Unit(benchmark::kMillisecond)->MinTime(0.2);
}
BENCHMARK_CAPTURE(rms_norm, f32, DType::f32)->Apply(threads);
BENCHMARK_CAPTURE(rms_norm, bf16, DType::bf16)->Apply(threads);
BENCHMARK_CAPTURE(rms_norm_gradient, f32, DType::f32)->Apply(threads);
BENCHMARK_CAPTURE(rms_norm_gradient, bf16, DType::bf16)->Apply(threads);
BENCHMARK_CAPTURE(swiglu, f32, DType::f32)->Apply(threads);
BENCHMARK_CAPTURE(swiglu, bf16, DType::bf16)->Apply(threads);
BENCHMARK_CAPTURE(swiglu_gradient, f32, DType::f32)->Apply(threads);
BENCHMARK_CAPTURE(swiglu_gradient, bf16, DType::bf16)->Apply(threads);
BENCHMARK_CAPTURE(loss_and_gradient, f32, DType::f32)->Apply(threads);
BENCHMARK_CAPTURE(loss_and_gradient, bf16, DType::bf16)->Apply(threads);
BENCHMARK(adamw)->Apply(threads);

}  // namespace
}  // namespace farspan

BENCHMARK_MAIN();
