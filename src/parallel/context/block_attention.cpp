// SPDX-License-Identifier: Apache-2.0
#include "parallel/context/block_attention.h"

#include <algorithm>
#include <array>

#include "ops/attention.h"
#include "ops/elementwise.h"

namespace farspan {
namespace {

// One row of a tensor whose first dimension is B: the same view without that dimension.
Tensor row_of(const Tensor& x, int64_t b) {
  std::array<int64_t, Shape::kMaxRank> sizes{};
  std::array<int64_t, Shape::kMaxRank> strides{};
  const auto rank = static_cast<size_t>(x.rank() - 1);
  for (size_t i = 0; i < rank; ++i) {
    sizes[i] = x.dim(static_cast<int>(i) + 1);
    strides[i] = x.stride(static_cast<int>(i) + 1);
  }
  return Tensor(x.slice(0, b, b + 1).raw(), x.dtype(), Shape(std::span<const int64_t>(sizes.data(), rank)),
                Shape(std::span<const int64_t>(strides.data(), rank)));
}

Tensor tokens_of(const Tensor& x, int dim, const LocalSpan& span) {
  return x.slice(dim, span.local_begin, span.local_begin + span.positions.length());
}

// Calls body(row, query span, key span, block) for every block with a visible pair: rows, then query spans, then key
// spans, each ascending, so that sums have one order.
template <typename Body>
void for_each_block(const AttentionCall& call, int key_rank, Span local, const Tensor& key, const Tensor& value,
                    Body&& body) {
  const auto query_spans = local_spans(call.layout, call.cp.rank(), {0, call.layout.local_length()});
  auto key_spans = local_spans(call.layout, key_rank, local);
  for (LocalSpan& span : key_spans) span.local_begin -= local.begin;  // from the row's memory to that of `key`

  for (int64_t b = 0; b < call.rows(); ++b) {
    const IntervalMask& mask = call.mask.rows[static_cast<size_t>(b)];
    for (const LocalSpan& queries : query_spans) {
      for (const LocalSpan& keys : key_spans) {
        const int64_t pairs = mask.visible_pairs(queries.positions, keys.positions);
        if (pairs == 0) continue;
        AttentionBlock block;
        block.query = tokens_of(row_of(call.query, b), 0, queries);
        block.key = tokens_of(row_of(key, b), 0, keys);
        block.value = tokens_of(row_of(value, b), 0, keys);
        block.lo = tokens_of(row_of(call.mask.lo, b), 0, queries);
        block.hi = tokens_of(row_of(call.mask.hi, b), 0, queries);
        block.key_begin = keys.positions.begin;
        block.scale = call.shape.scale;
        block.visible_pairs = pairs;
        body(b, queries, keys, block);
      }
    }
  }
}

}  // namespace

std::vector<LocalSpan> local_spans(const SequenceLayout& layout, int rank, Span local) {
  std::vector<LocalSpan> spans;
  int64_t local_begin = 0;
  for (Span chunk : layout.spans(rank)) {
    const int64_t from = std::max(local.begin, local_begin);
    const int64_t to = std::min(local.end, local_begin + chunk.length());
    const Span positions{chunk.begin + from - local_begin, chunk.begin + to - local_begin};
    local_begin += chunk.length();
    if (from >= to) continue;
    if (!spans.empty() && spans.back().positions.end == positions.begin)
      spans.back().positions.end = positions.end;
    else
      spans.push_back({positions, from});
  }
  return spans;
}

void start_state(const AttentionCall& call, Tensor out, Tensor lse) {
  for (int64_t b = 0; b < call.rows(); ++b) attention_state_init(call.device, row_of(out, b), row_of(lse, b));
}

void write_delta(const AttentionCall& call, const Tensor& out, const OutputGradient& gradient) {
  for (int64_t b = 0; b < call.rows(); ++b)
    attention_delta(call.device, row_of(out, b), row_of(gradient.d_out, b), row_of(gradient.delta, b));
}

void attend_forward(const AttentionCall& call, int key_rank, Span local, const Tensor& key, const Tensor& value,
                    Tensor out, Tensor lse) {
  for_each_block(call, key_rank, local, key, value,
                 [&](int64_t b, const LocalSpan& queries, const LocalSpan&, const AttentionBlock& block) {
                   attention_block_forward(call.device, block, tokens_of(row_of(out, b), 0, queries),
                                           tokens_of(row_of(lse, b), 1, queries));
                 });
}

void attend_backward(const AttentionCall& call, const OutputGradient& gradient, int key_rank, Span local,
                     const Tensor& key, const Tensor& value, Tensor d_key, Tensor d_value) {
  for_each_block(call, key_rank, local, key, value,
                 [&](int64_t b, const LocalSpan& queries, const LocalSpan& keys, const AttentionBlock& block) {
                   attention_block_backward(
                       call.device, block, tokens_of(row_of(gradient.d_out, b), 0, queries),
                       tokens_of(row_of(gradient.lse, b), 1, queries), tokens_of(row_of(gradient.delta, b), 1, queries),
                       tokens_of(row_of(gradient.d_query, b), 0, queries), tokens_of(row_of(d_key, b), 0, keys),
                       tokens_of(row_of(d_value, b), 0, keys));
                 });
}

Tensor packed_half(const Tensor& packed, int half) { return row_of(packed, half); }

void pack(Device& device, const Tensor& key, const Tensor& value, Tensor packed) {
  cast(device, key, packed_half(packed, 0));
  cast(device, value, packed_half(packed, 1));
}

void unpack(Device& device, const Tensor& packed, Tensor key, Tensor value) {
  cast(device, packed_half(packed, 0), key);
  cast(device, packed_half(packed, 1), value);
}

void zero_packed(Device& device, const Tensor& packed) { fill(device, packed.reshape({packed.numel()}), 0); }

}  // namespace farspan
