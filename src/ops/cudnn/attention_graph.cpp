// SPDX-License-Identifier: Apache-2.0
#include "ops/cudnn/attention_graph.h"

#include <cudnn_frontend.h>
#include <unordered_map>
#include <vector>

#include "device/cuda/cuda.h"

namespace farspan::cuda {
namespace {

namespace fe = cudnn_frontend;
using GraphTensor = std::shared_ptr<fe::graph::Tensor_attributes>;

void check(cudnnStatus_t status, const char* what) {
  if (status != CUDNN_STATUS_SUCCESS)
    throw InternalError(fmt::format("cuDNN: {} in {}", cudnnGetErrorString(status), what));
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// What the frontend knows a tensor by.
enum Uid : int64_t {
  kQuery = 1,
  kKey,
  kValue,
  kOut,
  kLse,
  kDOut,
  kDQuery,
  kDKey,
  kDValue,
  kQueryLengths,
  kKeyLengths,
  kTables = 100  // + the uid of the tensor whose offsets they are
};

// Adds the parts of one graph.
class GraphBuilder {
 public:
  explicit GraphBuilder(const AttentionGraphShape& shape)
      : shape_(shape), batch_(std::max<int64_t>(1, shape.documents)), graph_(std::make_shared<fe::graph::Graph>()) {
    graph_->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    if (shape.documents > 0) {
      query_lengths_ = numbers("query_lengths", kQueryLengths, batch_, fe::DataType_t::INT32);
      key_lengths_ = numbers("key_lengths", kKeyLengths, batch_, fe::DataType_t::INT32);
    }
  }

  std::shared_ptr<fe::graph::Graph> build() {
    const GraphTensor query = input("query", kQuery, shape_.query, shape_.queries);
    const GraphTensor key = input("key", kKey, shape_.key, shape_.keys);
    const GraphTensor value = input("value", kValue, shape_.value, shape_.keys);
    if (shape_.backward)
      backward(query, key, value);
    else
      forward(query, key, value);
    return graph_;
  }

 private:
  void forward(const GraphTensor& query, const GraphTensor& key, const GraphTensor& value) {
    auto attributes = fe::graph::SDPA_attributes().set_name("forward").set_generate_stats(true);
    set_mask(attributes);
    auto [out, lse] = graph_->sdpa(query, key, value, attributes);
    output(out, kOut, shape_.out, shape_.queries);
    lse->set_output(true);
    describe_lse(*lse);
  }

  void backward(const GraphTensor& query, const GraphTensor& key, const GraphTensor& value) {
    const GraphTensor out = input("out", kOut, shape_.out, shape_.queries);
    const GraphTensor d_out = input("d_out", kDOut, shape_.d_out, shape_.queries);
    fe::graph::Tensor_attributes lse_attributes;
    describe_lse(lse_attributes.set_name("lse"));
    const GraphTensor lse = graph_->tensor(lse_attributes);
    auto attributes = fe::graph::SDPA_backward_attributes().set_name("backward");
    set_mask(attributes);
    auto [d_query, d_key, d_value] = graph_->sdpa_backward(query, key, value, out, d_out, lse, attributes);
    output(d_query, kDQuery, shape_.d_query, shape_.queries);
    output(d_key, kDKey, shape_.d_key, shape_.keys);
    output(d_value, kDValue, shape_.d_value, shape_.keys);
  }

  template <typename Attributes>
  void set_mask(Attributes& attributes) const {
    attributes.set_attn_scale(shape_.scale);
    if (shape_.diagonal != Diagonal::none)
      attributes
          .set_diagonal_alignment(shape_.diagonal == Diagonal::top_left ? fe::DiagonalAlignment_t::TOP_LEFT
                                                                        : fe::DiagonalAlignment_t::BOTTOM_RIGHT)
          .set_diagonal_band_right_bound(0);
    if (shape_.documents > 0)
      attributes.set_padding_mask(true).set_seq_len_q(query_lengths_).set_seq_len_kv(key_lengths_);
  }

  GraphTensor numbers(const char* name, int64_t uid, int64_t count, fe::DataType_t type) {
    return graph_->tensor(fe::graph::Tensor_attributes()
                              .set_name(name)
                              .set_uid(uid)
                              .set_dim({count, 1, 1, 1})
                              .set_stride({1, 1, 1, 1})
                              .set_data_type(type));
  }

  void set_offsets(fe::graph::Tensor_attributes& tensor, int64_t uid) {
    if (shape_.documents > 0)
      tensor.set_ragged_offset(numbers("offsets", kTables + uid, batch_ + 1, fe::DataType_t::INT64));
  }

  void describe(fe::graph::Tensor_attributes& tensor, int64_t uid, const HeadsLayout& layout, int64_t tokens) {
    tensor.set_uid(uid)
        .set_data_type(fe::DataType_t::BFLOAT16)
        .set_dim({batch_, layout.heads, tokens, shape_.head_size})
        .set_stride({tokens * layout.token_stride, layout.head_stride, layout.token_stride, 1});
    set_offsets(tensor, uid);
  }

  void describe_lse(fe::graph::Tensor_attributes& lse) {
    const int64_t heads = shape_.query.heads;
    lse.set_uid(kLse)
        .set_data_type(fe::DataType_t::FLOAT)
        .set_dim({batch_, heads, shape_.queries, 1})
        .set_stride({heads * shape_.lse_stride, shape_.lse_stride, 1, 1});
    set_offsets(lse, kLse);
  }

  GraphTensor input(const char* name, int64_t uid, const HeadsLayout& layout, int64_t tokens) {
    fe::graph::Tensor_attributes tensor;
    describe(tensor.set_name(name), uid, layout, tokens);
    return graph_->tensor(tensor);
  }

  void output(const GraphTensor& tensor, int64_t uid, const HeadsLayout& layout, int64_t tokens) {
    tensor->set_output(true);
    describe(*tensor, uid, layout, tokens);
  }

  const AttentionGraphShape& shape_;
  int64_t batch_;
  std::shared_ptr<fe::graph::Graph> graph_;
  GraphTensor query_lengths_;
  GraphTensor key_lengths_;
};

}  // namespace

struct AttentionGraph::Built {
  cudnnHandle_t handle = nullptr;
  bool backward = false;
  bool documents = false;
  std::shared_ptr<fe::graph::Graph> graph;
  std::string refusal;
  int64_t workspace_bytes = 0;
};

struct AttentionGraphs::Handle {
  cudnnHandle_t handle = nullptr;
};

const std::string& AttentionGraph::refusal() const { return built_->refusal; }
int64_t AttentionGraph::workspace_bytes() const { return built_->workspace_bytes; }

void AttentionGraph::run(const AttentionGraphData& data, void* workspace) const {
  std::unordered_map<int64_t, void*> addresses;
  const auto add = [&](int64_t uid, const void* tensor, int64_t* offsets = nullptr) {
    addresses[uid] = const_cast<void*>(tensor);  // the frontend takes inputs and outputs alike
    if (built_->documents) addresses[kTables + uid] = offsets;
  };
  const DocumentTables& t = data.tables;
  add(kQuery, data.query, t.query);
  add(kKey, data.key, t.key);
  add(kValue, data.value, t.value);
  add(kOut, data.out, t.out);
  add(kLse, data.lse, t.lse);
  if (built_->backward) {
    add(kDOut, data.d_out);
    add(kDQuery, data.d_query);
    add(kDKey, data.d_key);
    add(kDValue, data.d_value);
  }
  if (built_->documents) {
    addresses[kQueryLengths] = t.query_lengths;
    addresses[kKeyLengths] = t.key_lengths;
  }
  fe::error_t error = built_->graph->execute(built_->handle, addresses, workspace);
  if (error.is_bad()) throw InternalError(fmt::format("cuDNN attention: {}", error.get_message()));
}

AttentionGraphs::AttentionGraphs(Device& device) : handle_(std::make_unique<Handle>()) {
  check(cudnnCreate(&handle_->handle), "cudnnCreate");
  check(cudnnSetStream(handle_->handle, compute_stream(device)), "cudnnSetStream");
}

AttentionGraphs::~AttentionGraphs() {
  graphs_.clear();
  if (handle_->handle != nullptr) cudnnDestroy(handle_->handle);
}

const AttentionGraph& AttentionGraphs::of(const AttentionGraphShape& shape) {
  if (const auto known = graphs_.find(shape); known != graphs_.end()) return known->second;
  auto built = std::make_shared<AttentionGraph::Built>();
  built->handle = handle_->handle;
  built->backward = shape.backward;
  built->documents = shape.documents > 0;
  built->graph = GraphBuilder(shape).build();
  fe::error_t error = built->graph->build(handle_->handle, {fe::HeurMode_t::A});
  if (error.is_bad())
    built->refusal = fmt::format("cuDNN {}: {}", cudnn_version(), first_line(error.get_message()));
  else
    built->workspace_bytes = built->graph->get_workspace_size();
  return graphs_.emplace(shape, AttentionGraph(std::move(built))).first->second;
}

int64_t cudnn_version() { return static_cast<int64_t>(cudnnGetVersion()); }

}  // namespace farspan::cuda
