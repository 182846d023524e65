// SPDX-License-Identifier: Apache-2.0
// Graphs of cuDNN's fused attention, as its C++ frontend builds them: made once for each shape, kept, and run with the
// addresses of the day.
//
// A graph takes one block of exactly `queries` and `keys`, or a batch of documents of at most that many each, which lie
// anywhere in the tensors. Tables on the device then say where each begins and how long it is.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "device/device.h"

namespace farspan::cuda {

// How heads lie in a tensor (tokens, heads, head size), in elements.
struct HeadsLayout {
  int64_t heads = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  auto operator<=>(const HeadsLayout&) const = default;
};

enum class Diagonal { none, top_left, bottom_right };

struct AttentionGraphShape {
  bool backward = false;
  Diagonal diagonal = Diagonal::none;
  int64_t documents = 0;  // 0: one block; else the batch, and tables are read
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t head_size = 0;
  float scale = 1;
  int64_t lse_stride = 0;  // from head to head
  HeadsLayout query, key, value, out;
  HeadsLayout d_out, d_query, d_key, d_value;  // backward
  auto operator<=>(const AttentionGraphShape&) const = default;
};

// Device addresses of the documents' tables: lengths are i32 of `documents`, offsets in elements i64 of one more.
struct DocumentTables {
  int32_t* query_lengths = nullptr;
  int32_t* key_lengths = nullptr;
  int64_t* query = nullptr;
  int64_t* key = nullptr;
  int64_t* value = nullptr;
  int64_t* out = nullptr;
  int64_t* lse = nullptr;
};

// Device addresses. Forward writes out and lse, backward reads them.
struct AttentionGraphData {
  const void* query = nullptr;
  const void* key = nullptr;
  const void* value = nullptr;
  void* out = nullptr;
  float* lse = nullptr;
  const void* d_out = nullptr;
  void* d_query = nullptr;
  void* d_key = nullptr;
  void* d_value = nullptr;
  DocumentTables tables;
};

class AttentionGraph {
 public:
  struct Built;
  explicit AttentionGraph(std::shared_ptr<Built> built) : built_(std::move(built)) {}

  // Why cuDNN does not take the shape; empty when it does.
  const std::string& refusal() const;
  int64_t workspace_bytes() const;
  // Queues it on the device's compute stream.
  void run(const AttentionGraphData& data, void* workspace) const;

 private:
  std::shared_ptr<Built> built_;
};

// A device's graphs (Device::extension).
class AttentionGraphs {
 public:
  explicit AttentionGraphs(Device& device);
  ~AttentionGraphs();
  AttentionGraphs(const AttentionGraphs&) = delete;
  AttentionGraphs& operator=(const AttentionGraphs&) = delete;

  // Built at the first call with a shape: 50 ms, or a second where its kernel has to be compiled.
  const AttentionGraph& of(const AttentionGraphShape& shape);

 private:
  struct Handle;
  std::unique_ptr<Handle> handle_;
  std::map<AttentionGraphShape, AttentionGraph> graphs_;
};

// The library's version as it writes it, 91400 for 9.14.0.
int64_t cudnn_version();

}  // namespace farspan::cuda
