// SPDX-License-Identifier: Apache-2.0
// What FP8 would gain: sustained rates of the linear layers' products on GPU 0 in bf16 and in FP8.
//
//   cuda_fp8_gemm_bench MODEL TOKENS [SECONDS]     MODEL: qwen3-1.7b or llama-3.2-1b
//
// The library's FP8 kernels of Hopper want both operands dense along the summed dimension, so the backward products
// need transposed copies; here only the products are timed. Forward e4m3 x e4m3, backward e5m2 (gradient) x e4m3, one
// scale a tensor or one a piece of 128 (weights 128 x 128). "fast": sums stay in the tensor core's short accumulator.
#include <cstdio>
#include <cstdlib>
#include <cuda_fp8.h>

#include "bench/cuda_gemm_shapes.h"
#include "ops/cuda/cublaslt.h"
#include "ops/cuda/scratch.h"

namespace farspan::bench {
namespace {

using cuda::CublasLt;
using cuda::Matmul;
using cuda::MatmulAlgorithm;
using cuda::MatmulMatrix;
using cuda::MatmulRun;

constexpr int kCandidates = 8;

// D (m, n) = A^T B by columns; both operands are dense along k.
struct Product {
  std::string name;
  int64_t m, n, k;
  cudaDataType_t a, b;  // of FP8
  cudaDataType_t d;
  float beta;
};

enum class Scales { none, tensor, pieces };

class Fp8Bench {
 public:
  explicit Fp8Bench(double seconds) : seconds_(seconds), library_(device_) {
    device_.run({"matmul", OpClass::gemm, 0, 0, cuda::kGemmScratchBytes}, [] {});
    const std::vector<float> ones(int64_t{1} << 22, 1.0f);
    scales_ = DeviceMemory(device_, static_cast<int64_t>(ones.size() * sizeof(float)));
    copy_to_device(device_, ones.data(), scales_.data(), scales_.bytes());
  }

  void product(const Product& p) {
    const int64_t a_size = p.m * p.k, b_size = p.n * p.k;
    const auto bf16 = [](double value) { return to_bfloat16(static_cast<float>(value)); };
    const auto e4m3 = [](double value) { return __nv_fp8_e4m3(static_cast<float>(value)); };
    const auto e5m2 = [](double value) { return __nv_fp8_e5m2(static_cast<float>(value)); };
    const DeviceMemory wide_a = random_memory(device_, a_size, bf16), wide_b = random_memory(device_, b_size, bf16);
    const DeviceMemory a =
        p.a == CUDA_R_8F_E5M2 ? random_memory(device_, a_size, e5m2) : random_memory(device_, a_size, e4m3);
    const DeviceMemory b =
        p.b == CUDA_R_8F_E5M2 ? random_memory(device_, b_size, e5m2) : random_memory(device_, b_size, e4m3);
    const DeviceMemory d = random_memory(device_, p.m * p.n * (p.d == CUDA_R_32F ? 2 : 1), bf16);
    std::string line = fmt::format("{:36} {:6} x {:6} x {:6}", p.name, p.m, p.n, p.k);
    line += rate(p, "bf16", matmul_of(p, CUDA_R_16BF, CUDA_R_16BF, Scales::none, false),
                 {wide_a.data(), wide_b.data(), d.data(), d.data(), 1, p.beta});
    const MatmulRun run{a.data(), b.data(), d.data(), d.data(), 1, p.beta};
    for (const bool fast : {true, false})
      line += rate(p, fast ? "fp8 fast" : "fp8", matmul_of(p, p.a, p.b, Scales::tensor, fast), run);
    line += rate(p, "fp8 pieces", matmul_of(p, p.a, p.b, Scales::pieces, false), run);
    fmt::print("{}\n", line);
    std::fflush(stdout);
  }

 private:
  Matmul matmul_of(const Product& p, cudaDataType_t a, cudaDataType_t b, Scales scales, bool fast) const {
    const MatmulMatrix d{p.d, p.m, p.n, p.m};
    Matmul matmul({a, p.k, p.m, p.k}, CUBLAS_OP_T, {b, p.k, p.n, p.k}, CUBLAS_OP_N, d, d);
    if (scales == Scales::none) return matmul;
    matmul.set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(fast));
    matmul.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scales_.data());
    matmul.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scales_.data());
    if (scales == Scales::pieces) {
      matmul.set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, static_cast<int32_t>(CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F));
      matmul.set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, static_cast<int32_t>(CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F));
    }
    return matmul;
  }

  std::string rate(const Product& p, const char* name, const Matmul& matmul, const MatmulRun& run) const {
    const std::vector<MatmulAlgorithm> algorithms = library_.algorithms(matmul, alignments(run), kCandidates);
    const int chosen = algorithms.empty() ? -1 : library_.fastest(matmul, algorithms, run);
    if (chosen < 0) return fmt::format("  {} -", name);
    const Contender contender{const_cast<Device*>(&device_), [&] {
                                FARSPAN_CUBLAS(library_.run(matmul, algorithms[static_cast<size_t>(chosen)], run));
                              }};
    const double seconds = sustained_seconds({&contender, 1}, seconds_)[0];
    const double flops = 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
    return fmt::format("  {} {:.0f}", name, flops / seconds * 1e-12);
  }

  double seconds_;
  Device device_{DeviceKind::cuda, 1};
  CublasLt library_;
  DeviceMemory scales_;
};

}  // namespace
}  // namespace farspan::bench

int main(int argc, char** argv) {
  if (argc < 3) {
    fmt::print(stderr, "cuda_fp8_gemm_bench MODEL TOKENS [SECONDS]\n");
    return 2;
  }
  using namespace farspan;
  const bench::ModelShape model = bench::model_named(argv[1]);
  const int64_t tokens = std::atoll(argv[2]);
  bench::Fp8Bench bench(argc > 3 ? std::atof(argv[3]) : 0.3);
  fmt::print("TFLOP/s of {} at {} tokens; \"-\": the library has no such product\n", model.name, tokens);
  for (const bench::LinearLayer& layer : model.layers()) {
    bench.product(
        {layer.name + " forward", layer.out, tokens, layer.in, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_16BF, 0});
    bench.product(
        {layer.name + " backward input", layer.in, tokens, layer.out, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2, CUDA_R_16BF, 0});
    bench.product(
        {layer.name + " backward weight", layer.in, layer.out, tokens, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2, CUDA_R_32F, 1});
  }
}
