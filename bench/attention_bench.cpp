// SPDX-License-Identifier: Apache-2.0
// Block attention beside the machine's own speed: every case reports GFLOP/s counted on visible pairs only, and its
// ratio to an fp32 GEMM of 2048 x 2048 x 2048 by oneDNN, timed just before on as many threads.
#include <algorithm>
#include <benchmark/benchmark.h>
#include <chrono>
#include <cmath>
#include <dnnl.hpp>
#include <string>
#include <vector>

#include "base/philox.h"
#include "ops/attention.h"

namespace farspan {
namespace {

enum class Pass { forward, backward };

struct Case {
  std::string name;
  int64_t tokens = 0;  // queries and keys
  int64_t heads = 8;
  int64_t kv_heads = 8;
  int64_t head_size = 64;
  DType dtype = DType::f32;
  bool causal = true;
  int64_t window = 0;    // 0: none
  int64_t document = 0;  // tokens of a document; 0: all
};

double seconds_of(auto&& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// FLOP/s of one fp32 GEMM, the best of a few.
double gemm_rate() {
  constexpr dnnl_dim_t kSize = 2048;
  static std::vector<float> a(kSize * kSize, 1.0f), b(kSize * kSize, 0.5f), c(kSize * kSize);
  const auto gemm = [&] {
    dnnl::sgemm('N', 'N', kSize, kSize, kSize, 1, a.data(), kSize, b.data(), kSize, 0, c.data(), kSize);
  };
  gemm();
  double best = INFINITY;
  for (int i = 0; i < 5; ++i) best = std::min(best, seconds_of(gemm));
  return 2.0 * kSize * kSize * kSize / best;
}

// Standard normal values.
class Values {
 public:
  Values(std::string_view name, Shape shape, DType dtype)
      : shape_(shape), dtype_(dtype), f32_(static_cast<size_t>(shape.numel())) {
    const Philox random(1, name);
    for (size_t i = 0; i < f32_.size(); ++i) f32_[i] = static_cast<float>(random.normal(i));
    if (dtype == DType::bf16)
      for (float x : f32_) bf16_.push_back(to_bfloat16(x));
  }
  Tensor tensor() { return {dtype_ == DType::f32 ? static_cast<void*>(f32_.data()) : bf16_.data(), dtype_, shape_}; }

 private:
  Shape shape_;
  DType dtype_;
  std::vector<float> f32_;
  std::vector<BFloat16> bf16_;
};

// A case's tensors; its mask is causal or full, windowed, cut into documents, or any of these together.
struct Problem {
  explicit Problem(const Case& c)
      : query("query", {c.tokens, c.heads, c.head_size}, c.dtype),
        key("key", {c.tokens, c.kv_heads, c.head_size}, c.dtype),
        value("value", {c.tokens, c.kv_heads, c.head_size}, c.dtype),
        d_out("d_out", {c.tokens, c.heads, c.head_size}, c.dtype),
        out("out", {c.tokens, c.heads, c.head_size}, DType::f32),
        d_query("d_query", {c.tokens, c.heads, c.head_size}, DType::f32),
        d_key("d_key", {c.tokens, c.kv_heads, c.head_size}, DType::f32),
        d_value("d_value", {c.tokens, c.kv_heads, c.head_size}, DType::f32),
        lse("lse", {c.heads, c.tokens}, DType::f32),
        delta("delta", {c.heads, c.tokens}, DType::f32) {
    for (int64_t i = 0; i < c.tokens; ++i) {
      const int64_t document = c.document > 0 ? i / c.document * c.document : 0;
      const int64_t end = c.document > 0 ? std::min(c.tokens, document + c.document) : c.tokens;
      lo.push_back(std::max(document, c.window > 0 ? i + 1 - c.window : 0));
      hi.push_back(c.causal ? i + 1 : end);
      pairs += hi.back() - lo.back();
    }
    block = {.query = query.tensor(),
             .key = key.tensor(),
             .value = value.tensor(),
             .lo = {lo.data(), DType::i64, {c.tokens}},
             .hi = {hi.data(), DType::i64, {c.tokens}},
             .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(c.head_size))),
             .visible_pairs = pairs};
  }

  Values query, key, value, d_out, out, d_query, d_key, d_value, lse, delta;
  std::vector<int64_t> lo, hi;
  int64_t pairs = 0;
  AttentionBlock block;
};

void run_case(benchmark::State& state, const Case& c, Pass pass) {
  Problem p(c);
  Device device(DeviceKind::cpu, threads_per_rank(1));
  const auto forward = [&] {
    attention_state_init(device, p.out.tensor(), p.lse.tensor());
    attention_block_forward(device, p.block, StateUse::add, p.out.tensor(), p.lse.tensor());
  };
  forward();
  attention_delta(device, p.out.tensor(), p.d_out.tensor(), p.delta.tensor());
  const double gemm = gemm_rate();
  double seconds = 0;
  for (auto _ : state) {
    seconds += seconds_of([&] {
      if (pass == Pass::forward)
        forward();
      else
        attention_block_backward(device, p.block, {}, p.d_out.tensor(), p.lse.tensor(), p.delta.tensor(),
                                 Accumulate::yes, Accumulate::yes, p.d_query.tensor(), p.d_key.tensor(),
                                 p.d_value.tensor());
    });
  }
  const double flops_a_pair = pass == Pass::forward ? 4 : 10;
  const double flops = flops_a_pair * static_cast<double>(p.pairs * c.heads * c.head_size);
  const double rate = flops * static_cast<double>(state.iterations()) / seconds;
  state.counters["GFLOP/s"] = rate * 1e-9;
  state.counters["GEMM_GFLOP/s"] = gemm * 1e-9;
  state.counters["of_GEMM"] = rate / gemm;
}

const std::vector<Case> kCases = {
    {.name = "causal_8192x8h64", .tokens = 8192},
    {.name = "full_2048x8h64", .tokens = 2048, .causal = false},
    {.name = "causal_4096x4h128", .tokens = 4096, .heads = 4, .kv_heads = 4, .head_size = 128},
    {.name = "causal_4096x8:2h64", .tokens = 4096, .kv_heads = 2},
    {.name = "causal_4096x8h64_bf16", .tokens = 4096, .dtype = DType::bf16},
    {.name = "window_1024_8192x8h64", .tokens = 8192, .window = 1024},
    {.name = "documents_300_8192x8h64", .tokens = 8192, .document = 300},
};

}  // namespace
}  // namespace farspan

int main(int argc, char** argv) {
  using farspan::Pass;
  for (const farspan::Case& c : farspan::kCases)
    for (const Pass pass : {Pass::forward, Pass::backward})
      benchmark::RegisterBenchmark((c.name + (pass == Pass::forward ? "/forward" : "/backward")).c_str(),
                                   [&c, pass](benchmark::State& state) { farspan::run_case(state, c, pass); })
          ->Unit(benchmark::kMillisecond)
          ->UseRealTime();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
