// SPDX-License-Identifier: Apache-2.0
#include "ops/cudnn/attention_cudnn.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>

#include "device/cuda/cuda.h"
#include "ops/cuda/attention_merge.h"
#include "ops/cuda/attention_scratch.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/scratch_parts.h"
#include "ops/cudnn/block_plan.h"

namespace farspan::cuda {
namespace {

constexpr int64_t kMostHeadSize = 256;
// From here on forward's log-sum-exps may lie at any stride.
constexpr int64_t kLeastVersion = 91200;

bool aligned(const Tensor& x) {
  const auto whole = [&](int64_t elements) { return elements * size_of(x.dtype()) % 16 == 0; };
  return reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0 && (x.dim(0) == 1 || whole(x.stride(0))) &&
         (x.dim(1) == 1 || whole(x.stride(1)));
}

// What cuDNN does not take, whatever the mask.
std::string refusal_of(const AttentionBlock& block) {
  if (block.query.dtype() != DType::bf16) return fmt::format("queries are {}, not bf16", name_of(block.query.dtype()));
  const int64_t head_size = block.query.dim(2);
  if (head_size % 8 != 0 || head_size > kMostHeadSize)
    return fmt::format("head size {} is not a multiple of 8 up to {}", head_size, kMostHeadSize);
  if (block.dropout.probability > 0) return "dropout is drawn by position";
  if (block.keeps_blind) return "queries that see nothing are to keep their results";
  if (cudnn_version() < kLeastVersion)
    return fmt::format("cuDNN is of version {}, before {}", cudnn_version(), kLeastVersion);
  for (const auto& [name, x] : {std::pair{"query", &block.query}, {"key", &block.key}, {"value", &block.value}})
    if (!aligned(*x)) return fmt::format("{} does not lie at multiples of 16 bytes", name);
  return {};
}

// What one graph reads and writes.
struct Operands {
  Tensor query, key, value;
  Tensor out, lse;
  Tensor d_out, d_query, d_key, d_value;  // backward
};

Tensor rows(const Tensor& x, int64_t begin, int64_t count) { return x.slice(0, begin, begin + count); }

// Head size elements from head to head where there is but one, so that equal shapes are equal.
HeadsLayout layout_of(const Tensor& x) { return {x.dim(1), x.stride(0), x.dim(1) == 1 ? x.dim(2) : x.stride(1)}; }

AttentionGraphShape shape_of(const Operands& x, float scale, Diagonal diagonal, const DocumentsCall* documents) {
  AttentionGraphShape shape;
  shape.backward = x.d_out.defined();
  shape.diagonal = diagonal;
  shape.documents = documents == nullptr ? 0 : documents->entries;
  shape.queries = documents == nullptr ? x.query.dim(0) : documents->queries;
  shape.keys = documents == nullptr ? x.key.dim(0) : documents->keys;
  shape.head_size = x.query.dim(2);
  shape.scale = scale;
  shape.lse_stride = x.lse.dim(0) == 1 ? x.lse.dim(1) : x.lse.stride(0);
  shape.query = layout_of(x.query);
  shape.key = layout_of(x.key);
  shape.value = layout_of(x.value);
  shape.out = layout_of(x.out);
  if (shape.backward) {
    shape.d_out = layout_of(x.d_out);
    shape.d_query = layout_of(x.d_query);
    shape.d_key = layout_of(x.d_key);
    shape.d_value = layout_of(x.d_value);
  }
  return shape;
}

// A graph with its operands, ready to be queued.
class GraphCall {
 public:
  // Sets `refusal` when cuDNN does not take the shape, or wants more workspace than lies behind `scratch`.
  GraphCall(Device& device, const Operands& x, float scale, Diagonal diagonal, const DocumentsCall* documents,
            void* tables, const ScratchParts& scratch, std::string& refusal)
      : operands_(x), documents_(documents), tables_(tables), workspace_(scratch.rest()) {
    graph_ = &device.extension<AttentionGraphs>().of(shape_of(x, scale, diagonal, documents));
    if (!graph_->refusal().empty())
      refusal = graph_->refusal();
    else if (graph_->workspace_bytes() > scratch.left())
      refusal = fmt::format("the graph wants {} bytes of workspace, {} are planned", graph_->workspace_bytes(),
                            scratch.left());
  }

  void run(Device& device) const {
    const Operands& x = operands_;
    AttentionGraphData data{.query = x.query.raw(),
                            .key = x.key.raw(),
                            .value = x.value.raw(),
                            .out = x.out.raw(),
                            .lse = x.lse.data<float>(),
                            .d_out = x.d_out.raw(),
                            .d_query = x.d_query.raw(),
                            .d_key = x.d_key.raw(),
                            .d_value = x.d_value.raw(),
                            .tables = {}};
    if (documents_ != nullptr) data.tables = write_tables(device);
    graph_->run(data, workspace_);
  }

 private:
  DocumentTables write_tables(Device& device) const {
    const int64_t entries = documents_->entries;
    char* next = static_cast<char*>(tables_);
    const auto take = [&](int64_t bytes) { return std::exchange(next, next + bytes); };
    DocumentTables tables;
    std::array<OffsetTable, kMostOffsetTables> offsets{};
    size_t count = 0;
    const auto add = [&](const Tensor& x, bool of_keys) {
      auto* const table = reinterpret_cast<int64_t*>(take(8 * (entries + 1)));
      offsets[count++] = {table, x.rank() == 3 ? x.stride(0) : 1, of_keys};
      return table;
    };
    const Operands& x = operands_;
    tables.query = add(x.query, false);
    tables.key = add(x.key, true);
    tables.value = add(x.value, true);
    tables.out = add(x.out, false);
    tables.lse = add(x.lse, false);
    tables.query_lengths = reinterpret_cast<int32_t*>(take(4 * entries));
    tables.key_lengths = reinterpret_cast<int32_t*>(take(4 * entries));
    write_document_tables(compute_stream(device), documents_->documents, entries, tables.query_lengths,
                          tables.key_lengths, offsets);
    return tables;
  }

  Operands operands_;
  const DocumentsCall* documents_;
  void* tables_;
  void* workspace_;
  const AttentionGraph* graph_ = nullptr;
};

// Documents of different lengths take several calls of cuDNN, each of which ends in a wave of its own; the own kernels
// take them in one. Where a query sees 8192 keys on average these run at 593 TFLOP/s on an H200 and cuDNN at 558, at
// 2048 at 430 and 458; between them they meet.
constexpr int64_t kLongDocuments = 4096;

// Why documents are left to the own kernels; empty where they are not.
std::string refusal_of_documents(const BlockPlan& plan, const AttentionForward& call) {
  if (plan.documents.empty()) return {};
  // Merged with what is there they are as slow as the own kernels, or slower, and each length would need a graph.
  if (call.out.dtype() != DType::bf16)
    return "results of documents that pass through an fp32 state are left to the own kernels";
  const bool alike = plan.documents.size() == 1 && plan.documents[0].documents.size() > 1;
  if (!alike && call.block.visible_pairs >= kLongDocuments * call.block.query.dim(0))
    return "long results of documents of different lengths are left to the own kernels";
  return {};
}

// Why a rectangle is.
std::string refusal_of_rectangles(const BlockPlan& plan, const AttentionForward& call) {
  if (plan.rectangles.empty()) return {};
  const AttentionBlock& block = call.block;
  const auto what = left_to_own_kernels({.head_size = block.query.dim(2),
                                         .queries = block.query.dim(0),
                                         .causal = plan.diagonal != Diagonal::none,
                                         .square = block.query.dim(0) == block.key.dim(0),
                                         .straight = place_of(call.out) == ResultPlace::caller});
  return what ? fmt::format("{} are left to the own kernels", *what) : std::string();
}

// Forward of a block, as calls of cuDNN and merges of their results into the state. Results go straight to the caller
// where they are all that a query has seen so far and the caller wants them in bf16, else through scratch.
class ForwardCalls {
 public:
  ForwardCalls(Device& device, const AttentionForward& call) : device_(device), call_(call) {
    refusal_ = refusal_of(call.block);
    if (!refusal_.empty()) return;
    straight_ = call.out.dtype() == DType::bf16;
    if (straight_ && !aligned(call.out)) refusal_ = "out does not lie at multiples of 16 bytes";
    if (!refusal_.empty()) return;
    plan_ = plan_block(call.block, Pass::forward);
    refusal_ = plan_.refusal;
    if (refusal_.empty()) refusal_ = refusal_of_documents(plan_, call);
    if (refusal_.empty()) refusal_ = refusal_of_rectangles(plan_, call);
    if (!refusal_.empty()) return;
    for (const RectangleCall& rectangle : plan_.rectangles) prepare(rectangle);
    if (!plan_.documents.empty()) prepare_documents();
  }

  const std::string& refusal() const { return refusal_; }

  void run() {
    if (!plan_.documents.empty()) return run_documents();
    for (size_t i = 0; i < steps_.size(); ++i) {
      steps_[i].graph.run(device_);
      if (steps_[i].through_scratch) merge(steps_[i], plan_.rectangles[i].adds_to_queries);
    }
  }

 private:
  struct Step {
    GraphCall graph;
    bool through_scratch;
    Tensor result, result_lse;
    Tensor out, lse;  // where it is to go
  };

  void add_step(Operands x, bool straight, Diagonal diagonal, const DocumentsCall* documents) {
    ScratchParts scratch(device_);
    void* const tables = scratch.take(kDocumentTableBytes);
    const Tensor out = x.out, lse = x.lse;
    if (!straight) {
      x.out = scratch.take(DType::bf16, out.shape());
      x.lse = scratch.take(DType::f32, lse.shape());
    }
    std::string refusal;
    GraphCall graph(device_, x, call_.block.scale, diagonal, documents, tables, scratch, refusal);
    if (refusal_.empty()) refusal_ = refusal;
    steps_.push_back({std::move(graph), !straight, x.out, x.lse, out, lse});
  }

  void prepare(const RectangleCall& r) {
    const Document& d = r.rectangle;
    const AttentionBlock& b = call_.block;
    Operands x;
    x.query = rows(b.query, d.query_begin, d.queries);
    x.key = rows(b.key, d.key_begin, d.keys);
    x.value = rows(b.value, d.key_begin, d.keys);
    x.out = rows(call_.out, d.query_begin, d.queries);
    x.lse = call_.lse.slice(1, d.query_begin, d.query_begin + d.queries);
    add_step(x, straight_ && !r.adds_to_queries, r.diagonal, nullptr);
  }

  void prepare_documents() {
    Operands x;
    x.query = call_.block.query;
    x.key = call_.block.key;
    x.value = call_.block.value;
    x.out = call_.out;
    x.lse = call_.lse;
    for (const DocumentsCall& documents : plan_.documents) add_step(x, true, plan_.diagonal, &documents);
  }

  // All documents' results lie in one tensor.
  void run_documents() {
    if (!plan_.covers_queries) {
      fill(device_, call_.lse, -std::numeric_limits<double>::infinity());
      fill(device_, call_.out, 0);
    }
    for (const Step& step : steps_) step.graph.run(device_);
  }

  void merge(const Step& step, bool adds) {
    const StateUse use = adds ? StateUse::add : call_.use;
    attention_merge(device_, step.result, step.result_lse, use, step.out, step.lse);
  }

  Device& device_;
  const AttentionForward& call_;
  std::string refusal_;
  bool straight_ = false;
  BlockPlan plan_;
  std::vector<Step> steps_;
};

// Key/value heads [kv_begin, kv_end) of a block, and the query heads that read them.
struct HeadGroup {
  int64_t kv_begin, kv_end;
  int64_t begin, end;
  Tensor of_queries(const Tensor& x) const { return x.slice(1, begin, end); }
  Tensor of_keys(const Tensor& x) const { return x.slice(1, kv_begin, kv_end); }
  Tensor of_scalars(const Tensor& x) const { return x.slice(0, begin, end); }
};

// A gradient that cuDNN writes to scratch, and where it is to go.
struct Passage {
  Tensor result;
  Tensor target;
  bool adds = false;
};

BlockPlan plan_gradients(const Device& device, const AttentionBlock& block) {
  BlockPlan plan;
  plan.refusal = device.deterministic() ? "its sums have no fixed order" : refusal_of(block);
  if (plan.refusal.empty() && leaves_gradients_to_own_kernels(block.query.dim(2)))
    plan.refusal = "gradients of wide heads are left to the own kernels";
  if (!plan.refusal.empty()) return plan;
  plan = plan_block(block, Pass::backward);
  // On an H200 the own kernels take 0.5 to 1.1 of its time for documents of 512 to 8000 tokens, and need no graphs.
  if (!plan.documents.empty()) plan.refusal = "gradients of documents are left to the own kernels";
  return plan;
}

// Backward of a block, as calls of cuDNN for some heads each, and additions of their results.
class BackwardCalls {
 public:
  BackwardCalls(Device& device, const AttentionBackward& call) : device_(device), call_(call) {
    plan_ = plan_gradients(device, call.block);
    refusal_ = plan_.refusal;
    if (refusal_.empty()) refusal_ = refusal_of_call();
    if (!refusal_.empty()) return;
    for (const RectangleCall& rectangle : plan_.rectangles) prepare(rectangle);
  }

  const std::string& refusal() const { return refusal_; }

  void run() {
    for (const Step& step : steps_) {
      for (const Copy& copy : step.copies) cast(device_, copy.from, copy.to);
      step.graph->run(device_);
      for (const Passage& passage : step.passages) {
        if (passage.adds)
          add(device_, passage.target, passage.result, passage.target);
        else
          cast(device_, passage.result, passage.target);
      }
    }
  }

 private:
  struct Copy {
    Tensor from, to;
  };
  struct Step {
    std::vector<Copy> copies;  // made first, of what does not lie as the graphs read it
    std::optional<GraphCall> graph;
    std::vector<Passage> passages;
  };

  std::string refusal_of_call() const {
    if (!call_.out.defined()) return "it needs the final out";
    std::string refusal;
    for (const auto& [name, x] : {std::pair{"out", &call_.out}, {"d_out", &call_.d_out}})
      if (refusal.empty() && !aligned(*x)) refusal = fmt::format("{} does not lie at multiples of 16 bytes", name);
    return refusal;
  }

  template <typename Body>
  void for_each_group(int64_t kv_heads, Body&& body) const {
    const int64_t share = call_.block.query.dim(1) / call_.block.key.dim(1);
    for (int64_t kv = 0; kv < call_.block.key.dim(1); kv += kv_heads)
      body(HeadGroup{kv, kv + kv_heads, kv * share, (kv + kv_heads) * share});
  }

  static bool straight(const Tensor& target, Accumulate use, bool adds) {
    return target.dtype() == DType::bf16 && use == Accumulate::no && !adds && aligned(target);
  }

  // Lets the graph write to scratch what it cannot write to the target.
  void pass(Step& step, ScratchParts& scratch, Tensor& target, Accumulate use, bool adds, bool through_scratch) const {
    if (!through_scratch) return;
    const Tensor result = scratch.take(DType::bf16, target.shape());
    step.passages.push_back({result, target, adds || use == Accumulate::yes});
    target = result;
  }

  static void pack(Step& step, ScratchParts& scratch, Tensor& x) {
    if (x.contiguous()) return;
    const Tensor packed = scratch.take(x.dtype(), x.shape());
    step.copies.push_back({x, packed});
    x = packed;
  }

  void prepare(const RectangleCall& r) {
    const Document& d = r.rectangle;
    const bool query_straight = straight(call_.d_query, call_.d_query_use, r.adds_to_queries);
    const bool key_straight = straight(call_.d_key, call_.d_key_value_use, r.adds_to_keys) && aligned(call_.d_value);
    AttentionSizes sizes(call_.block);
    sizes.queries = d.queries;
    sizes.keys = d.keys;
    const ResultPlace place = query_straight && key_straight ? ResultPlace::caller : ResultPlace::scratch;
    for_each_group(kv_heads_a_call(sizes, place), [&](const HeadGroup& group) {
      const auto of_queries = [&](const Tensor& x) { return rows(group.of_queries(x), d.query_begin, d.queries); };
      const auto of_keys = [&](const Tensor& x) { return rows(group.of_keys(x), d.key_begin, d.keys); };
      Operands x = operands(of_queries, of_keys);
      x.lse = group.of_scalars(call_.lse).slice(1, d.query_begin, d.query_begin + d.queries);
      Step step;
      ScratchParts scratch(device_);
      pack(step, scratch, x.lse);  // cuDNN before 9.26 reads those of its heads one behind the other
      pass(step, scratch, x.d_query, call_.d_query_use, r.adds_to_queries, !query_straight);
      pass(step, scratch, x.d_key, call_.d_key_value_use, r.adds_to_keys, !key_straight);
      pass(step, scratch, x.d_value, call_.d_key_value_use, r.adds_to_keys, !key_straight);
      std::string refusal;
      step.graph.emplace(device_, x, call_.block.scale, r.diagonal, nullptr, nullptr, scratch, refusal);
      if (refusal_.empty()) refusal_ = refusal;
      steps_.push_back(std::move(step));
    });
  }

  template <typename OfQueries, typename OfKeys>
  Operands operands(OfQueries&& of_queries, OfKeys&& of_keys) const {
    Operands x;
    x.query = of_queries(call_.block.query);
    x.key = of_keys(call_.block.key);
    x.value = of_keys(call_.block.value);
    x.out = of_queries(call_.out);
    x.d_out = of_queries(call_.d_out);
    x.d_query = of_queries(call_.d_query);
    x.d_key = of_keys(call_.d_key);
    x.d_value = of_keys(call_.d_value);
    return x;
  }

  Device& device_;
  const AttentionBackward& call_;
  std::string refusal_;
  BlockPlan plan_;
  std::vector<Step> steps_;
};

}  // namespace

std::string cudnn_forward_declines(Device& device, const AttentionForward& call) {
  return ForwardCalls(device, call).refusal();
}

std::string cudnn_backward_declines(Device& device, const AttentionBackward& call) {
  return BackwardCalls(device, call).refusal();
}

bool cudnn_takes_gradients_of(const Device& device, const AttentionBlock& block) {
  return plan_gradients(device, block).refusal.empty();
}

void cudnn_forward(Device& device, const AttentionForward& call) { ForwardCalls(device, call).run(); }

void cudnn_backward(Device& device, const AttentionBackward& call) { BackwardCalls(device, call).run(); }

}  // namespace farspan::cuda
