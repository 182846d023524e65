// SPDX-License-Identifier: Apache-2.0
// Embedding, loss, sums and optimizer steps, on one GPU (bench/cuda_memory_bench.h):
//
//   cuda_loss_bench [part of the ops' names]
//
// The bytes of embedding_backward count each token's row of the table as if it came once; where tokens repeat it moves
// less.
#include <cmath>
#include <string>
#include <vector>

#include "bench/cuda_memory_bench.h"
#include "ops/cross_entropy.h"
#include "ops/embedding.h"
#include "ops/norms.h"
#include "ops/optimizer_step.h"

namespace farspan {
namespace {

// As frequent as words are: id i + 1 about 1 / i times as often as the first.
std::vector<int32_t> zipf_ids(int64_t count, int64_t vocabulary) {
  std::mt19937 bits(7);
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < count; ++t) {
    const double rank = std::pow(static_cast<double>(vocabulary), (static_cast<double>(bits()) + 0.5) * 0x1p-32);
    ids.push_back(static_cast<int32_t>(std::min<int64_t>(vocabulary - 1, static_cast<int64_t>(rank))));
  }
  return ids;
}

void bench_cross_entropy(Bench& bench, int64_t tokens, int64_t vocabulary) {
  Device& device = bench.device();
  const Shape shape{tokens, vocabulary};
  const std::vector<int32_t> targets = zipf_ids(tokens, vocabulary);
  const auto loss = [&] { return bench.take(DType::f32, Shape{tokens}); };
  bench.run(shape.str() + " no gradient", [&] {
    const Tensor logits = bench.take(DType::f32, shape), ids = bench.ids(targets), token_loss = loss();
    return [=, &device] { cross_entropy(device, logits, ids, 1e-3, token_loss, Tensor()); };
  });
  bench.run(shape.str() + " f32 in place", [&] {
    const Tensor logits = bench.take(DType::f32, shape), ids = bench.ids(targets), token_loss = loss();
    return [=, &device] { cross_entropy(device, logits, ids, 1e-3, token_loss, logits); };
  });
  bench.run(shape.str() + " bf16", [&] {
    const Tensor logits = bench.take(DType::f32, shape), ids = bench.ids(targets), token_loss = loss();
    const Tensor d_logits = bench.take(DType::bf16, shape);
    return [=, &device] { cross_entropy(device, logits, ids, 1e-3, token_loss, d_logits); };
  });
}

// A rank's part of 151936 ids.
void bench_vocabulary_parts(Bench& bench, int64_t tokens, int64_t columns) {
  Device& device = bench.device();
  const VocabularyPart part{.first_id = 0, .vocabulary = 151936};
  const Shape shape{tokens, columns};
  const std::vector<int32_t> targets = zipf_ids(tokens, part.vocabulary);
  bench.run(shape.str(), [&] {
    const Tensor logits = bench.take(DType::f32, shape), ids = bench.ids(targets);
    const Tensor statistics = bench.take(DType::f32, Shape{2, tokens});
    return [=, &device] { vocabulary_statistics(device, logits, ids, part, statistics); };
  });
  bench.run(shape.str() + " bf16", [&] {
    const Tensor logits = bench.take(DType::f32, shape), ids = bench.ids(targets);
    const Tensor lse = bench.take(DType::f32, Shape{tokens}), d_logits = bench.take(DType::bf16, shape);
    return [=, &device] { vocabulary_gradient(device, logits, ids, part, lse, 1e-3, d_logits); };
  });
}

void bench_embedding(Bench& bench, int64_t tokens, int64_t vocabulary) {
  Device& device = bench.device();
  constexpr int64_t kWidth = 2048;
  const std::vector<int32_t> numbers = zipf_ids(tokens, vocabulary);
  const std::string what = fmt::format("({}, {}) of {}", tokens, kWidth, vocabulary);
  bench.run(what, [&] {
    const Tensor ids = bench.ids(numbers), weight = bench.take(DType::bf16, Shape{vocabulary, kWidth});
    const Tensor y = bench.take(DType::bf16, Shape{tokens, kWidth});
    return [=, &device] { embedding_forward(device, ids, weight, y); };
  });
  bench.run(what, [&] {
    const Tensor ids = bench.ids(numbers), d_weight = bench.take(DType::f32, Shape{vocabulary, kWidth});
    const Tensor d_y = bench.take(DType::bf16, Shape{tokens, kWidth});
    return [=, &device] { embedding_backward(device, ids, d_y, d_weight); };
  });
}

void bench_sums(Bench& bench, int64_t count) {
  Device& device = bench.device();
  bench.run(Shape{count}.str(), [&] {
    const Tensor x = bench.take(DType::f32, Shape{count}), sum = bench.take(DType::f64, Shape{1});
    return [=, &device] { sum_of_squares(device, x, sum); };
  });
  bench.run(Shape{count}.str(), [&] {
    const Tensor x = bench.take(DType::f32, Shape{count}), sum = bench.take(DType::f64, Shape{1});
    return [=, &device] { token_loss_sum(device, x, sum); };
  });
}

// What an update of all parameters of these sizes takes; the copies are bf16.
void bench_steps(Bench& bench, const std::string& what, const std::vector<int64_t>& sizes) {
  Device& device = bench.device();
  const auto f32 = [&](int64_t n) { return bench.take(DType::f32, Shape{n}); };
  bench.run(what, [&] {
    std::vector<AdamWTensors> parameters;
    for (const int64_t n : sizes)
      parameters.push_back({f32(n), f32(n), f32(n), f32(n), bench.take(DType::bf16, {n}), 0.1});
    return [=, &device] { adamw_step_many(device, {.lr = 1e-4, .step = 10}, parameters); };
  });
  bench.run(what, [&] {
    std::vector<Tensor> gradients;
    for (const int64_t n : sizes) gradients.push_back(f32(n));
    const Tensor sum = bench.take(DType::f64, Shape{1});
    return [=, &device] { sum_of_squares(device, gradients, sum); };
  });
  if (sizes.size() > 1) return;
  bench.run(what, [&] {
    const int64_t n = sizes.front();
    const Tensor gradient = f32(n), weight = f32(n), copy = bench.take(DType::bf16, Shape{n});
    return [=, &device] { sgd_step(device, {.lr = 1e-4, .weight_decay = 0.1}, gradient, weight, copy); };
  });
}

void run(const std::string& wanted) {
  Bench bench(wanted);
  std::printf("%s\n", bench.device().accelerator().description().c_str());
  bench.run_copies();
  for (const auto& [tokens, vocabulary] : std::vector<std::pair<int64_t, int64_t>>{
           {2048, 151936}, {2048, 128256}, {1024, 262144}, {4096, 50257}, {8192, 32000}, {32768, 5000}, {131072, 259}})
    bench_cross_entropy(bench, tokens, vocabulary);
  bench_vocabulary_parts(bench, 4096, 151936 / 2);
  bench_vocabulary_parts(bench, 8192, 151936 / 8);
  for (const int64_t tokens : {8192, 131072})
    for (const int64_t vocabulary : {151936, 259}) bench_embedding(bench, tokens, vocabulary);
  bench_sums(bench, 131072);
  bench_steps(bench, "100M elements", {100000000});
  // 28 layers of Qwen3-1.7B, an eighth as wide.
  std::vector<int64_t> sizes;
  for (int layer = 0; layer < 28; ++layer)
    for (const int64_t n : {2048, 128, 128, 4096 * 256, 2048 * 256, 2048, 12288 * 256, 6144 * 256}) sizes.push_back(n);
  bench_steps(bench, std::to_string(sizes.size()) + " parameters", sizes);
}

}  // namespace
}  // namespace farspan

int main(int argc, char** argv) {
  if (farspan::cuda_device_count() == 0) {
    std::fprintf(stderr, "cuda_loss_bench: %s\n", farspan::cuda_absence().c_str());
    return 1;
  }
  farspan::run(argc > 1 ? argv[1] : "");
  return 0;
}
