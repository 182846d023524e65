// SPDX-License-Identifier: Apache-2.0
// Context-parallel attention on one GPU: what all ranks compute, one after the other, beside one rank alone.
//
//   cuda_context_attention_bench [part of the cases' names] [seconds for each figure]
//
// What a rank receives is copied from noise on its own GPU. The first figures are without those copies, which a link
// would bring beside the computing: the blocks, the merges of their results and the packing of what would travel.
// Below, the same with the copies, and by op. Variants take turns, each for so long that the GPU's power limit shows.
// A plain program: the benchmark library need not be where the GPU is.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bench/cuda_attention_noise.h"
#include "comm/communicator.h"
#include "config/names.h"
#include "device/cuda/cuda.h"
#include "parallel/balanced_layout.h"
#include "parallel/context/context_attention.h"
#include "parallel/deal.h"
#ifdef FARSPAN_WITH_CUDNN
#include "ops/cudnn/attention_graph.h"
#endif

namespace farspan {
namespace {

struct Case {
  std::string name;
  int64_t tokens;
  int64_t heads, kv_heads, head_dim;
  std::vector<Span> documents;

  double pairs() const {
    double pairs = 0;
    for (Span d : documents) pairs += 0.5 * static_cast<double>(d.length()) * static_cast<double>(d.length() + 1);
    return pairs;
  }
  // Forward's; backward takes 2.5 times as many.
  double flops() const { return 4 * static_cast<double>(heads * head_dim) * pairs(); }
};

struct Variant {
  int cp = 1;
  CpCommType comm_type = CpCommType::p2p;
  CpLayout layout = CpLayout::zigzag;
};

// Fills what would be received with noise: memory that was used for something else holds no numbers that attention
// would see.
class NoiseCommunicator final : public Communicator {
 public:
  NoiseCommunicator(Device& device, const DeviceMemory* noise, int rank, std::vector<int> ranks)
      : Communicator(Dimension::cp, rank, std::move(ranks)), device_(device), noise_(noise) {}

  Work all_reduce(Tensor, std::string_view) override { return {}; }
  Work all_gather(const Tensor&, Tensor whole, std::string_view) override { return receive(whole); }
  Work reduce_scatter(const Tensor&, Tensor part, std::string_view) override { return receive(part); }
  Work all_to_all(const Tensor&, Tensor received, std::string_view) override { return receive(received); }
  Work exchange(std::span<const Message>, std::span<const Message> receives, std::string_view) override {
    for (const Message& message : receives) receive(message.data);
    return {};
  }
  void barrier(std::string_view) override {}

  // What was received since the last call.
  std::vector<Tensor> take_received() { return std::exchange(received_, {}); }
  void copy_noise(const Tensor& to) const {
    for (int64_t begin = 0; begin < to.bytes(); begin += noise_->bytes()) {
      const auto piece = static_cast<size_t>(std::min(noise_->bytes(), to.bytes() - begin));
      FARSPAN_CUDA(cudaMemcpyAsync(static_cast<char*>(to.raw()) + begin, noise_->data(), piece,
                                   cudaMemcpyDeviceToDevice, cuda::compute_stream(device_)));
    }
  }

 private:
  Work receive(const Tensor& to) {
    if (noise_ == nullptr) return {};
    copy_noise(to);
    received_.push_back(to);
    return {};
  }

  Device& device_;
  const DeviceMemory* noise_;
  std::vector<Tensor> received_;
};

// One rank's part of a case, on a device that may be dry.
class Rank {
 public:
  Rank(const Case& c, const Variant& v, int rank, Device& device, const DeviceMemory* noise)
      : case_(c),
        device_(device),
        layout_(v.layout, c.tokens, v.cp),
        group_(std::make_unique<NoiseCommunicator>(device, noise, rank, ranks_of(v.cp))),
        attention_({group_.get(), nullptr, nullptr}, layout_, shape(), v.comm_type),
        memory_(device,
                2 * bytes(2 * row_width() + 2 * c.heads * c.head_dim) + 4 * s() * c.heads + 2 * 8 * s() + 4096) {
    qkv_ = take(DType::bf16, {1, s(), c.heads + 2 * c.kv_heads, c.head_dim});
    d_qkv_ = take(DType::bf16, qkv_.shape());
    out_ = take(DType::bf16, {1, s(), c.heads, c.head_dim});
    d_out_ = take(DType::bf16, out_.shape());
    lse_ = take(DType::f32, {1, c.heads, s()});
    mask_.rows.emplace_back(c.documents, MaskRule{});
    mask_.layouts.push_back(row_layout(layout_, mask_.rows.back()));
    mask_.lo = take(DType::i64, {1, s()});
    mask_.hi = take(DType::i64, {1, s()});
    std::vector<int64_t> lo(static_cast<size_t>(s())), hi(lo.size());
    deal_mask(mask_.layouts.back(), rank, mask_.rows.back(), lo, hi);
    copy_to_device(device, lo.data(), mask_.lo.raw(), mask_.lo.bytes());
    copy_to_device(device, hi.data(), mask_.hi.raw(), mask_.hi.bytes());
  }

  void fill(const Noise& noise) const {
    noise.fill(device_, qkv_.raw(), qkv_.bytes());
    noise.fill(device_, d_out_.raw(), d_out_.bytes());
  }

  void forward(Arena& arena) const {
    const ProgramScope scope(arena, "forward");
    attention_.forward(device_, arena, mask_, {}, heads(qkv_, 0), heads(qkv_, 1), heads(qkv_, 2), out_, lse_);
  }
  void backward(Arena& arena) const {
    const ProgramScope scope(arena, "backward");
    attention_.backward(device_, arena, mask_, {}, heads(qkv_, 0), heads(qkv_, 1), heads(qkv_, 2), out_, lse_, d_out_,
                        heads(d_qkv_, 0), heads(d_qkv_, 1), heads(d_qkv_, 2));
  }

  // Runs a pass, and returns the copies that it made.
  template <typename Pass>
  std::vector<Tensor> copies_of(Pass&& pass) const {
    group_->take_received();
    pass();
    return group_->take_received();
  }
  void copy_again(const std::vector<Tensor>& copies) const {
    for (const Tensor& to : copies) group_->copy_noise(to);
  }

 private:
  static std::vector<int> ranks_of(int cp) {
    std::vector<int> ranks(static_cast<size_t>(cp));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }
  int64_t s() const { return layout_.local_length(); }
  int64_t row_width() const { return (case_.heads + 2 * case_.kv_heads) * case_.head_dim; }
  int64_t bytes(int64_t width) const { return s() * width; }
  ContextAttentionShape shape() const {
    return {.heads = case_.heads,
            .kv_heads = case_.kv_heads,
            .head_dim = case_.head_dim,
            .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(case_.head_dim)))};
  }
  Tensor take(DType dtype, const Shape& shape) {
    const Tensor tensor(static_cast<char*>(memory_.data()) + used_, dtype, shape);
    used_ += (tensor.bytes() + 255) / 256 * 256;
    FARSPAN_CHECK(used_ <= memory_.bytes(), "bench: {} bytes of {} taken", used_, memory_.bytes());
    return tensor;
  }
  // Queries, keys or values of a fused row.
  Tensor heads(const Tensor& fused, int part) const {
    if (part == 0) return fused.slice(2, 0, case_.heads);
    const int64_t first = case_.heads + (part - 1) * case_.kv_heads;
    return fused.slice(2, first, first + case_.kv_heads);
  }

  const Case& case_;
  Device& device_;
  SequenceLayout layout_;
  std::unique_ptr<NoiseCommunicator> group_;
  ContextAttention attention_;
  DeviceMemory memory_;
  int64_t used_ = 0;
  Tensor qkv_, d_qkv_, out_, d_out_, lse_;
  BatchMask mask_;
};

// The plan of a rank's passes, in memory that is filled with noise before.
MemoryPlan plan_of(const Case& c, const Variant& v, int rank, int64_t noise_bytes) {
  Device device(DryRun{DeviceKind::cuda});
  const Rank dry(c, v, rank, device, nullptr);
  Arena arena(device);
  if (noise_bytes > 0) {
    const ProgramScope scope(arena, "noise");
    arena.take("noise", DType::bf16, {noise_bytes / 2}, Purpose::workspace);
  }
  dry.forward(arena);
  dry.backward(arena);
  return arena.plan();
}

// Seconds by op.
struct OpSeconds final : OpObserver {
  std::map<std::string, double> seconds;
  void on_op(const OpCost& cost, OpTime time) override { seconds[std::string(cost.op)] += time.seconds; }

  std::string text() const {
    std::string text;
    for (const auto& [op, each] : seconds) {
      char part[96];
      std::snprintf(part, sizeof part, "%s%s %.2f", text.empty() ? "" : ", ", op.c_str(), each * 1e3);
      text += part;
    }
    return text;
  }
};

struct Seconds {
  double forward = 0;
  double backward = 0;
  double forward_with_copies = 0;
  double backward_with_copies = 0;
  OpSeconds forward_ops, backward_ops;
};

template <typename Body>
void observe(Device& device, OpSeconds& ops, Body&& body) {
  device.observe(&ops);
  body();
  device.report_timings();
  device.observe(nullptr);
}

// All ranks of a variant in turn: the sum of their times.
Seconds measure(Device& device, const Noise& noise, const Case& c, const Variant& v, double seconds) {
  Seconds sum;
  const DeviceMemory received(device, int64_t{256} << 20);
  noise.fill(device, received.data(), received.bytes());
  for (int rank = 0; rank < v.cp; ++rank) {
    const int64_t program_bytes = plan_of(c, v, rank, 0).peak_bytes;
    Rank on_gpu(c, v, rank, device, &received);
    on_gpu.fill(noise);
    Arena arena(device, plan_of(c, v, rank, program_bytes));
    {
      const ProgramScope scope(arena, "noise");
      const Buffer all = arena.take("noise", DType::bf16, {program_bytes / 2}, Purpose::workspace);
      noise.fill(device, all.tensor().raw(), all.tensor().bytes());
    }
    const auto pass_seconds = [&](const auto& pass, double& without_copies, double& with_copies) {
      const double took = seconds_of(device, seconds, pass);
      with_copies += took;
      without_copies += took;
      const std::vector<Tensor> copies = on_gpu.copies_of(pass);
      if (!copies.empty()) without_copies -= seconds_of(device, seconds / 4, [&] { on_gpu.copy_again(copies); });
    };
    pass_seconds([&] { on_gpu.forward(arena); }, sum.forward, sum.forward_with_copies);
    pass_seconds([&] { on_gpu.backward(arena); }, sum.backward, sum.backward_with_copies);
    observe(device, sum.forward_ops, [&] { on_gpu.forward(arena); });
    observe(device, sum.backward_ops, [&] { on_gpu.backward(arena); });
    device.use_scratch(nullptr, 0);
  }
  return sum;
}

// A whole causal row as one call of cuDNN each way, without anything of ours; zeros where cuDNN declines it.
#ifndef FARSPAN_WITH_CUDNN
Seconds measure_whole_call(Device&, const Noise&, const Case&, double) { return {}; }
#else
Seconds measure_whole_call(Device& device, const Noise& noise, const Case& c, double seconds) {
  const int64_t width = (c.heads + 2 * c.kv_heads) * c.head_dim;
  const int64_t rows = c.tokens * 2;  // bytes of a column
  const DeviceMemory memory(device, rows * (2 * width + 2 * c.heads * c.head_dim) + 4 * c.tokens * c.heads);
  noise.fill(device, memory.data(), memory.bytes());
  char* next = static_cast<char*>(memory.data());
  const auto take = [&](int64_t bytes) { return std::exchange(next, next + bytes); };
  char* const qkv = take(rows * width);
  char* const d_qkv = take(rows * width);
  char* const out = take(rows * c.heads * c.head_dim);
  char* const d_out = take(rows * c.heads * c.head_dim);
  auto* const lse = reinterpret_cast<float*>(take(4 * c.tokens * c.heads));
  const int64_t key = 2 * c.heads * c.head_dim, value = key + 2 * c.kv_heads * c.head_dim;  // bytes behind the query

  cuda::AttentionGraphShape shape;
  shape.diagonal = cuda::Diagonal::top_left;
  shape.queries = shape.keys = c.tokens;
  shape.head_size = c.head_dim;
  shape.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(c.head_dim)));
  shape.lse_stride = c.tokens;
  shape.query = {c.heads, width, c.head_dim};
  shape.key = shape.value = {c.kv_heads, width, c.head_dim};
  shape.out = {c.heads, c.heads * c.head_dim, c.head_dim};
  cuda::AttentionGraphData data;
  data.query = qkv;
  data.key = qkv + key;
  data.value = qkv + value;
  data.out = out;
  data.lse = lse;
  const auto time = [&] {
    const cuda::AttentionGraph& graph = device.extension<cuda::AttentionGraphs>().of(shape);
    if (!graph.refusal().empty()) return 0.0;
    const DeviceMemory workspace(device, std::max<int64_t>(1, graph.workspace_bytes()));
    return seconds_of(device, seconds, [&] { graph.run(data, workspace.data()); });
  };
  Seconds took;
  took.forward = time();
  shape.backward = true;
  shape.d_out = shape.out;
  shape.d_query = shape.query;
  shape.d_key = shape.d_value = shape.key;
  data.d_out = d_out;
  data.d_query = d_qkv;
  data.d_key = d_qkv + key;
  data.d_value = d_qkv + value;
  took.backward = time();
  return took;
}
#endif

std::vector<Span> documents_of_mean(int64_t tokens, int64_t mean) {
  std::mt19937 random(11);
  std::exponential_distribution<double> length(1.0 / static_cast<double>(mean));
  std::vector<Span> documents;
  for (int64_t begin = 0; begin < tokens;) {
    const int64_t end = std::min(tokens, begin + 64 + static_cast<int64_t>(length(random)));
    documents.push_back({begin, end});
    begin = end;
  }
  return documents;
}

int run(const std::string& wanted, double seconds) {
  Device device(DeviceKind::cuda, 1);
  const Noise noise;
  const std::vector<Case> cases = {
      {"causal 128K hd128", 131072, 16, 8, 128, {{0, 131072}}},
      {"documents 128K hd128", 131072, 16, 8, 128, documents_of_mean(131072, 8192)},
      {"causal 128K hd64", 131072, 32, 8, 64, {{0, 131072}}},
      {"causal 32K hd128", 32768, 16, 8, 128, {{0, 32768}}},
      {"causal 8K hd128", 8192, 16, 8, 128, {{0, 8192}}},
  };
  for (const Case& c : cases) {
    if (c.name.find(wanted) == std::string::npos) continue;
    std::vector<Variant> variants = {{1}};
    if (c.tokens > 65536) {
      for (CpCommType type : {CpCommType::p2p, CpCommType::all_gather, CpCommType::a2a}) variants.push_back({8, type});
      if (c.documents.size() > 1) variants.push_back({8, CpCommType::p2p, CpLayout::balanced});
      variants.push_back({1});
    }
    Seconds alone;
    const Seconds whole = c.documents.size() == 1 ? measure_whole_call(device, noise, c, seconds) : Seconds{};
    if (whole.forward > 0 && whole.backward > 0)
      std::printf("%-22s one call of cuDNN: forward %8.3f ms %5.0f TFLOP/s   backward %8.3f ms %5.0f TFLOP/s\n",
                  c.name.c_str(), whole.forward * 1e3, c.flops() / whole.forward * 1e-12, whole.backward * 1e3,
                  2.5 * c.flops() / whole.backward * 1e-12);
    for (const Variant& v : variants) {
      const Seconds took = measure(device, noise, c, v, seconds);
      if (v.cp == 1) alone = took;
      std::printf(
          "%-22s cp %d %-10s %-10s forward %8.3f ms %5.0f TFLOP/s %.3f of cp 1   backward %8.3f ms %5.0f "
          "TFLOP/s %.3f of cp 1\n",
          c.name.c_str(), v.cp, std::string(choice_name(v.comm_type)).c_str(),
          std::string(choice_name(v.layout)).c_str(), took.forward * 1e3, c.flops() / took.forward * 1e-12,
          took.forward / alone.forward, took.backward * 1e3, 2.5 * c.flops() / took.backward * 1e-12,
          took.backward / alone.backward);
      if (v.cp > 1)
        std::printf("    with copies: forward %8.3f ms %.3f of cp 1   backward %8.3f ms %.3f of cp 1\n",
                    took.forward_with_copies * 1e3, took.forward_with_copies / alone.forward,
                    took.backward_with_copies * 1e3, took.backward_with_copies / alone.backward);
      std::printf("    ms: %s\n    ms: %s\n", took.forward_ops.text().c_str(), took.backward_ops.text().c_str());
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace
}  // namespace farspan

int main(int argc, char** argv) { return farspan::run(argc > 1 ? argv[1] : "", argc > 2 ? std::atof(argv[2]) : 1.0); }
