// SPDX-License-Identifier: Apache-2.0
// Sustained rates of the linear layers' products on GPU 0, with the library's first algorithm and with the timed one:
//
//   cuda_gemm_bench MODEL TOKENS [SECONDS]     MODEL: qwen3-1.7b or llama-3.2-1b
//
// One line a product; those of the head are of a tile of half the tokens. FARSPAN_VERBOSE=1 adds, on standard error,
// the algorithm that each runs.
#include <cstdio>
#include <cstdlib>

#include "bench/cuda_gemm_shapes.h"
#include "ops/gemm.h"

namespace farspan::bench {
namespace {

class GemmBench {
 public:
  explicit GemmBench(double seconds) : seconds_(seconds) {
    set_gemm_choice(first_, GemmChoice::heuristic);
    set_gemm_choice(timed_, GemmChoice::timed);
  }

  // `y_dtype`: of the layer's result; its gradient is bf16.
  void layer(const LinearLayer& layer, int64_t tokens, DType y_dtype) {
    const auto random = [&](int64_t elements) {
      return random_memory(first_, elements, [](double value) { return to_bfloat16(static_cast<float>(value)); });
    };
    const DeviceMemory x_memory = random(tokens * layer.in), w_memory = random(layer.out * layer.in),
                       d_y_memory = random(tokens * layer.out);
    const DeviceMemory y_memory(first_, tokens * layer.out * size_of(y_dtype)),
        d_x_memory(first_, tokens * layer.in * 2), d_w_memory(first_, layer.out * layer.in * 4);
    const Tensor x(x_memory.data(), DType::bf16, Shape{tokens, layer.in}),
        w(w_memory.data(), DType::bf16, Shape{layer.out, layer.in}),
        d_y(d_y_memory.data(), DType::bf16, Shape{tokens, layer.out}),
        y(y_memory.data(), y_dtype, Shape{tokens, layer.out}),
        d_x(d_x_memory.data(), DType::bf16, Shape{tokens, layer.in}),
        d_w(d_w_memory.data(), DType::f32, Shape{layer.out, layer.in});
    first_.synchronize();
    compare(layer, tokens, "forward", [&](Device& device) { linear_forward(device, x, w, y); });
    if (y_dtype == DType::bf16)
      compare(layer, tokens, "forward + residual", [&](Device& device) { linear_forward(device, x, w, d_y, y); });
    compare(layer, tokens, "backward input",
            [&](Device& device) { linear_backward_input(device, d_y, w, d_x, Accumulate::no); });
    linear_backward_weight(first_, d_y, x, d_w, Accumulate::no);
    first_.synchronize();
    compare(layer, tokens, "backward weight",
            [&](Device& device) { linear_backward_weight(device, d_y, x, d_w, Accumulate::yes); });
  }

 private:
  template <typename Product>
  void compare(const LinearLayer& layer, int64_t tokens, const char* direction, const Product& product) {
    const Contender contenders[] = {{&first_, [&] { product(first_); }}, {&timed_, [&] { product(timed_); }}};
    const std::vector<double> seconds = sustained_seconds(contenders, seconds_);
    const double flops =
        2.0 * static_cast<double>(tokens) * static_cast<double>(layer.in) * static_cast<double>(layer.out);
    fmt::print("{:17} {:19} T={:<6} I={:<5} O={:<7} first {:6.1f}  timed {:6.1f} TFLOP/s  ({:+.1f} %)\n", layer.name,
               direction, tokens, layer.in, layer.out, flops / seconds[0] * 1e-12, flops / seconds[1] * 1e-12,
               100 * (seconds[0] / seconds[1] - 1));
    std::fflush(stdout);
  }

  double seconds_;
  Device first_{DeviceKind::cuda, 1}, timed_{DeviceKind::cuda, 1};
};

}  // namespace
}  // namespace farspan::bench

int main(int argc, char** argv) {
  if (argc < 3) {
    fmt::print(stderr, "cuda_gemm_bench MODEL TOKENS [SECONDS]\n");
    return 2;
  }
  using namespace farspan;
  const bench::ModelShape model = bench::model_named(argv[1]);
  const int64_t tokens = std::atoll(argv[2]);
  bench::GemmBench bench(argc > 3 ? std::atof(argv[3]) : 0.3);
  for (const bench::LinearLayer& layer : model.layers()) bench.layer(layer, tokens, DType::bf16);
  bench.layer(model.head(), tokens / 2, DType::f32);
}
