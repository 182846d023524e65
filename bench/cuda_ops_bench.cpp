// SPDX-License-Identifier: Apache-2.0
// Ops on the rows of a layer that memory bounds, on one GPU (bench/cuda_memory_bench.h):
//
//   cuda_ops_bench [part of the ops' names]
#include <string>
#include <tuple>
#include <vector>

#include "base/math.h"
#include "bench/cuda_memory_bench.h"
#include "ops/attention.h"
#include "ops/bias.h"
#include "ops/dropout.h"
#include "ops/elementwise.h"
#include "ops/fp8.h"
#include "ops/rms_norm.h"
#include "ops/rms_norm_rope.h"
#include "ops/rope.h"
#include "ops/swiglu.h"

namespace farspan {
namespace {

std::string text(const Shape& shape, DType dtype) { return shape.str() + " " + std::string(name_of(dtype)); }

void bench_elementwise(Bench& bench, int64_t tokens) {
  Device& device = bench.device();
  const Shape shape{tokens, 2048};
  for (const DType dtype : {DType::bf16, DType::f32}) {
    const DType other = dtype == DType::bf16 ? DType::f32 : DType::bf16;
    bench.run(text(shape, dtype), [&] {
      const Tensor a = bench.take(dtype, shape), b = bench.take(dtype, shape), y = bench.take(dtype, shape);
      return [&device, a, b, y] { add(device, a, b, y); };
    });
    bench.run(text(shape, dtype) + " += f32", [&] {
      const Tensor a = bench.take(DType::f32, shape), b = bench.take(dtype, shape);
      return [&device, a, b] { add(device, a, b, a); };
    });
    bench.run(text(shape, dtype) + " to " + std::string(name_of(other)), [&] {
      const Tensor x = bench.take(dtype, shape), y = bench.take(other, shape);
      return [&device, x, y] { cast(device, x, y); };
    });
    bench.run(text(shape, dtype) + " every other head", [&] {
      const Tensor x = bench.take(dtype, Shape{tokens, 8, 4, 128}), y = bench.take(dtype, Shape{tokens, 8, 2, 128});
      return [&device, x, y] { cast(device, x.slice(2, 1, 3), y); };
    });
    bench.run(text(shape, dtype), [&] {
      const Tensor x = bench.take(dtype, shape);
      return [&device, x] { fill(device, x, 0.5); };
    });
  }
  bench.run(text(shape, DType::f32), [&] {
    const Tensor x = bench.take(DType::f32, shape);
    return [&device, x] { scale(device, x, 1.0); };
  });
}

void bench_norms(Bench& bench, int64_t tokens, int64_t hidden, DType dtype) {
  Device& device = bench.device();
  const Shape shape{tokens, hidden};
  bench.run(text(shape, dtype), [&] {
    const Tensor x = bench.take(dtype, shape), y = bench.take(dtype, shape), weight = bench.take(dtype, Shape{hidden}),
                 rstd = bench.take(DType::f32, Shape{tokens});
    return [=, &device] { rms_norm_forward(device, x, weight, 1e-6, y, rstd); };
  });
  bench.run(text(shape, dtype) + " with amax", [&] {
    const Tensor x = bench.take(dtype, shape), y = bench.take(dtype, shape), weight = bench.take(dtype, Shape{hidden}),
                 rstd = bench.take(DType::f32, Shape{tokens}), amax = bench.take(DType::f32, Shape{1});
    return [=, &device] { rms_norm_forward(device, x, weight, 1e-6, y, rstd, amax); };
  });
  for (const Accumulate accumulate : {Accumulate::yes, Accumulate::no})
    bench.run(text(shape, dtype) + (accumulate == Accumulate::yes ? " added" : ""), [&] {
      const Tensor x = bench.take(dtype, shape), d_y = bench.take(dtype, shape), d_x = bench.take(dtype, shape);
      const Tensor weight = bench.take(dtype, Shape{hidden}), rstd = bench.take(DType::f32, Shape{tokens});
      const Tensor d_weight = bench.take(DType::f32, Shape{hidden});
      return [=, &device] { rms_norm_backward(device, d_y, x, weight, rstd, d_x, accumulate, d_weight); };
    });
}

// Query heads, and key heads, of one fused row; `keys` as many as values.
void bench_heads(Bench& bench, int64_t tokens, int64_t queries, int64_t keys, int64_t head_dim, DType dtype) {
  Device& device = bench.device();
  const int64_t heads = queries + 2 * keys;
  const std::string what = fmt::format("({}, {} of {}, {}) {}", tokens, queries, heads, head_dim, name_of(dtype));
  const auto fused = [&] { return bench.take(dtype, Shape{tokens, heads, head_dim}); };
  const auto table = [&] { return bench.take(DType::f32, Shape{tokens, 2, head_dim / 2}); };
  bench.run(what, [&] {
    const Tensor x = fused().slice(1, 0, queries), entries = table();
    return [=, &device] { rope_apply(device, entries, RopeStyle::half_split, RopeDirection::forward, x); };
  });
  bench.run(what + " interleaved", [&] {
    const Tensor x = fused().slice(1, 0, queries), entries = table();
    return [=, &device] { rope_apply(device, entries, RopeStyle::interleaved, RopeDirection::forward, x); };
  });
  bench.run(what + " and keys", [&] {
    const Tensor x = fused().slice(1, 0, queries + keys), entries = table();
    return [=, &device] { rope_apply(device, entries, RopeStyle::half_split, RopeDirection::forward, x); };
  });
  const auto weight = [&] { return bench.take(dtype, Shape{head_dim}); };
  const auto rstd = [&] { return bench.take(DType::f32, Shape{tokens, queries}); };
  bench.run(what, [&] {
    const Tensor x = fused().slice(1, 0, queries), y = fused().slice(1, 0, queries), w = weight(), r = rstd();
    return [=, &device] { rms_norm_forward(device, x, w, 1e-6, y, r); };
  });
  bench.run(what, [&] {
    const Tensor x = fused().slice(1, 0, queries), d = fused().slice(1, 0, queries), w = weight(), r = rstd();
    const Tensor d_weight = bench.take(DType::f32, Shape{head_dim});
    return [=, &device] { rms_norm_backward(device, d, x, w, r, d, Accumulate::no, d_weight); };
  });
  bench.run(what, [&] {
    const Tensor x = fused().slice(1, 0, queries), y = fused().slice(1, 0, queries), w = weight(), r = rstd();
    const Tensor entries = table();
    return [=, &device] { rms_norm_rope_forward(device, x, w, 1e-6, entries, RopeStyle::half_split, y, r); };
  });
  bench.run(what, [&] {
    const Tensor x = fused().slice(1, 0, queries), d = fused().slice(1, 0, queries), w = weight(), r = rstd();
    const Tensor entries = table(), d_weight = bench.take(DType::f32, Shape{head_dim});
    return [=, &device] { rms_norm_rope_backward(device, d, x, w, r, entries, RopeStyle::half_split, d, d_weight); };
  });
}

// Of one row of a batch, heads beside each other.
void bench_delta(Bench& bench, int64_t tokens, int64_t heads, int64_t head_dim, DType dtype) {
  Device& device = bench.device();
  const Shape shape{tokens, heads, head_dim};
  bench.run(text(shape, dtype), [&] {
    const Tensor out = bench.take(dtype, shape), d_out = bench.take(dtype, shape);
    const Tensor delta = bench.take(DType::f32, Shape{heads, tokens});
    return [=, &device] { attention_delta(device, out, d_out, delta); };
  });
}

void bench_rope_table(Bench& bench, int64_t tokens, int64_t head_dim) {
  Device& device = bench.device();
  const std::vector<double> frequencies = rope_inverse_frequencies({.head_dim = head_dim});
  bench.run(fmt::format("({}, 2, {})", tokens, head_dim / 2), [&] {
    const Tensor positions = bench.positions(tokens), table = bench.take(DType::f32, Shape{tokens, 2, head_dim / 2});
    return [=, &device] { rope_table(device, positions, frequencies, 1.0, table); };
  });
}

// Matrices that a layer's products read: activations, the widest gradient, a weight.
void bench_fp8(Bench& bench, int64_t rows, int64_t columns) {
  Device& device = bench.device();
  const auto copies = [&](DType dtype, bool values, bool transposed) {
    Fp8Matrix matrix;
    if (values) matrix.values = bench.take(dtype, Shape{rows, columns});
    if (transposed) matrix.transposed = bench.take(dtype, Shape{columns, round_up(rows, kFp8Multiple)});
    matrix.scale = bench.take(DType::f32, Shape{1});
    return matrix;
  };
  for (const auto& [what, dtype, values, transposed] : {std::tuple{" values", DType::f8e4m3, true, false},
                                                        {" transposed", DType::f8e4m3, false, true},
                                                        {" both", DType::f8e5m2, true, true}}) {
    bench.run(text(Shape{rows, columns}, dtype) + what, [&, dtype = dtype, values = values, transposed = transposed] {
      const Tensor x = bench.take(DType::bf16, Shape{rows, columns});
      const Fp8Matrix to = copies(dtype, values, transposed);
      return [=, &device] { fp8_quantise(device, x, to); };
    });
    bench.run(text(Shape{rows, columns}, dtype) + what + ", amax known",
              [&, dtype = dtype, values = values, transposed = transposed] {
                const Tensor x = bench.take(DType::bf16, Shape{rows, columns}), amax = bench.take(DType::f32, Shape{1});
                const Fp8Matrix to = copies(dtype, values, transposed);
                return [=, &device] { fp8_quantise(device, x, amax, to); };
              });
  }
}

void bench_swiglu(Bench& bench, int64_t tokens, int64_t width, DType dtype) {
  Device& device = bench.device();
  const Shape both{tokens, 2 * width}, one{tokens, width};
  bench.run(text(both, dtype), [&] {
    const Tensor gate_up = bench.take(dtype, both), y = bench.take(dtype, one);
    return [=, &device] { swiglu_forward(device, gate_up, y); };
  });
  bench.run(text(both, dtype) + " with amax", [&] {
    const Tensor gate_up = bench.take(dtype, both), y = bench.take(dtype, one), amax = bench.take(DType::f32, Shape{1});
    return [=, &device] { swiglu_forward(device, gate_up, y, amax); };
  });
  bench.run(text(both, dtype) + " in place", [&] {
    const Tensor gate_up = bench.take(dtype, both), d_y = bench.take(dtype, one);
    return [=, &device] { swiglu_backward(device, gate_up, d_y, gate_up); };
  });
  bench.run(text(both, dtype) + " in place", [&] {
    const Tensor gate_up = bench.take(dtype, both), d_y = bench.take(dtype, one);
    return [=, &device] { swiglu_backward_and_output(device, gate_up, d_y, gate_up, d_y); };
  });
  bench.run(text(both, dtype) + " in place, with amax", [&] {
    const Tensor gate_up = bench.take(dtype, both), d_y = bench.take(dtype, one),
                 d_amax = bench.take(DType::f32, Shape{1}), amax = bench.take(DType::f32, Shape{1});
    return [=, &device] { swiglu_backward_and_output(device, gate_up, d_y, gate_up, d_y, d_amax, amax); };
  });
}

void bench_bias(Bench& bench, int64_t tokens, int64_t width, DType dtype) {
  Device& device = bench.device();
  const Shape shape{tokens, width};
  bench.run(text(shape, dtype), [&] {
    const Tensor y = bench.take(dtype, shape), bias = bench.take(dtype, Shape{width});
    return [=, &device] { bias_add(device, bias, y); };
  });
  bench.run(text(shape, dtype), [&] {
    const Tensor d_y = bench.take(dtype, shape), d_bias = bench.take(DType::f32, Shape{width});
    return [=, &device] { bias_backward(device, d_y, d_bias); };
  });
}

void bench_dropout(Bench& bench, int64_t tokens, int64_t hidden, DType dtype) {
  Device& device = bench.device();
  const Shape shape{tokens, hidden};
  const Dropout dropout{.probability = 0.1, .key = 42};
  bench.run(text(shape, dtype), [&] {
    const Tensor index = bench.positions(tokens), x = bench.take(dtype, shape), y = bench.take(dtype, shape);
    return [=, &device] { dropout_add(device, dropout, index, x, y, y); };
  });
  bench.run(text(shape, dtype), [&] {
    const Tensor index = bench.positions(tokens), d_y = bench.take(dtype, shape), d_z = bench.take(dtype, shape);
    return [=, &device] { dropout_backward(device, dropout, index, d_y, d_z); };
  });
}

void run(const std::string& wanted) {
  Bench bench(wanted);
  std::printf("%s\n", bench.device().accelerator().description().c_str());
  bench.run_copies();
  for (const int64_t tokens : {8192, 32768}) bench_elementwise(bench, tokens);
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const int64_t tokens : {8192, 32768}) {
      for (const int64_t hidden : {2048, 4096, 5120}) bench_norms(bench, tokens, hidden, dtype);
      bench_heads(bench, tokens, 16, 8, 128, dtype);
      bench_heads(bench, tokens, 32, 8, 64, dtype);
      for (const int64_t width : {6144, 8192}) bench_swiglu(bench, tokens, width, dtype);
      bench_bias(bench, tokens, 4096, dtype);
      bench_dropout(bench, tokens, 2048, dtype);
      bench_delta(bench, tokens, 16, 128, dtype);
    }
  for (const int64_t columns : {2048, 6144, 12288}) bench_fp8(bench, 8192, columns);
  for (const int64_t tokens : {8192, 131072}) bench_rope_table(bench, tokens, 128);
  bench.run_copies();
}

}  // namespace
}  // namespace farspan

int main(int argc, char** argv) {
  if (farspan::cuda_device_count() == 0) {
    std::fprintf(stderr, "cuda_ops_bench: %s\n", farspan::cuda_absence().c_str());
    return 1;
  }
  farspan::run(argc > 1 ? argv[1] : "");
  return 0;
}
