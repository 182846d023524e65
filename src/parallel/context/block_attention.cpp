// SPDX-License-Identifier: Apache-2.0
#include "parallel/context/block_attention.h"

#include <algorithm>
#include <array>

#include "ops/attention.h"

namespace farspan {
namespace {

Tensor tokens_of(const Tensor& x, int dim, const LocalSpan& span) {
  return x.slice(dim, span.local_begin, span.local_begin + span.positions.length());
}

// The query heads that read key/value heads `heads`.
Span query_heads(const ContextAttentionShape& shape, Span heads) {
  const int64_t group = shape.heads / shape.kv_heads;
  return {heads.begin * group, heads.end * group};
}

// What one block touches of tensors that have a query in each entry.
struct QueryPart {
  int64_t row;
  LocalSpan queries;
  Span heads;
  Tensor of_heads(const Tensor& x) const {  // (B, s, A, D) -> (n, a, D)
    return tokens_of(entry(x, row), 0, queries).slice(1, heads.begin, heads.end);
  }
  Tensor of_scalars(const Tensor& x) const {  // (B, A, s) -> (a, n)
    return tokens_of(entry(x, row), 1, queries).slice(0, heads.begin, heads.end);
  }
};

AttentionBlock block_of(const AttentionCall& call, const QueryPart& part, const KeyBlock& keys, int64_t pairs) {
  AttentionBlock block;
  block.query = part.of_heads(call.query);
  block.key = keys.key;
  block.value = keys.value;
  block.lo = tokens_of(entry(call.lo, part.row), 0, part.queries);
  block.hi = tokens_of(entry(call.hi, part.row), 0, part.queries);
  block.key_begin = keys.segment.keys.positions.begin;
  block.query_begin = part.queries.positions.begin;
  block.scale = call.shape.scale;
  block.visible_pairs = pairs;
  if (call.dropout.probability > 0) {
    block.dropout = call.dropout;
    block.dropout.row = call.row_ids[static_cast<size_t>(part.row)];
    block.dropout.first_head = call.shape.first_head + part.heads.begin;
  }
  return block;
}

// Calls body(part, block) for every block of these keys with a visible pair, queries ascending, so that sums have one
// order.
template <typename Body>
void for_each_block(const AttentionCall& call, const KeyBlock& keys, Body&& body) {
  const auto row = static_cast<size_t>(keys.segment.row);
  const Span positions = keys.segment.keys.positions;
  const std::vector<QuerySpan>& spans = call.query_spans[row];
  auto span = std::partition_point(spans.begin(), spans.end(),
                                   [&](const QuerySpan& s) { return s.sees.end <= positions.begin; });
  for (; span != spans.end() && span->sees.begin < positions.end; ++span) {
    const int64_t pairs = call.rows.masks[row].visible_pairs(span->queries.positions, positions);
    if (pairs == 0) continue;
    const QueryPart part{keys.segment.row, span->queries, query_heads(call.shape, keys.heads)};
    body(part, block_of(call, part, keys, pairs));
  }
}

// Calls body(segment) for each of this rank's own segments: rows, then positions, ascending.
template <typename Body>
void for_each_own_segment(const AttentionCall& call, Body&& body) {
  for (int64_t row = 0; row < call.rows.count(); ++row)
    for (const LocalSpan& span : call.rows.layouts[static_cast<size_t>(row)].spans(call.rank()))
      body(Segment{row, span});
}

// The tokens of one of this rank's segments in a tensor of all its local tokens: (B, s, K, D) -> (tokens, K, D).
Tensor own_tokens(const Tensor& x, const Segment& segment) { return tokens_of(entry(x, segment.row), 0, segment.keys); }

KeyBlock own_keys(const AttentionCall& call, const Segment& segment) {
  return {segment, {0, call.shape.kv_heads}, own_tokens(call.key, segment), own_tokens(call.value, segment)};
}

}  // namespace

void AttentionCall::prepare() {
  query_spans.assign(static_cast<size_t>(rows.count()), {});
  for (size_t row = 0; row < query_spans.size(); ++row)
    for (const LocalSpan& span : rows.layouts[row].spans(rank())) {
      const Span sees = rows.masks[row].visible_range(span.positions);
      if (!sees.empty()) query_spans[row].push_back({span, sees});
    }
}

void start_state(const AttentionCall& call, Tensor out, Tensor lse) {
  for (int64_t b = 0; b < call.rows.count(); ++b) attention_state_init(call.device, entry(out, b), entry(lse, b));
}

void write_delta(Device& device, const Tensor& out, const Tensor& d_out, Tensor delta) {
  for (int64_t b = 0; b < out.dim(0); ++b) attention_delta(device, entry(out, b), entry(d_out, b), entry(delta, b));
}

void attend_forward(const AttentionCall& call, const KeyBlock& keys, Tensor out, Tensor lse) {
  for_each_block(call, keys, [&](const QueryPart& part, const AttentionBlock& block) {
    attention_block_forward(call.device, block, part.of_heads(out), part.of_scalars(lse));
  });
}

void attend_backward(const AttentionCall& call, const OutputGradient& gradient, const KeyBlock& keys, Tensor d_key,
                     Tensor d_value) {
  for_each_block(call, keys, [&](const QueryPart& part, const AttentionBlock& block) {
    attention_block_backward(call.device, block, part.of_heads(gradient.d_out), part.of_scalars(gradient.lse),
                             part.of_scalars(gradient.delta), part.of_heads(gradient.d_query), d_key, d_value);
  });
}

void attend_own_forward(const AttentionCall& call, Tensor out, Tensor lse) {
  for_each_own_segment(call, [&](const Segment& segment) { attend_forward(call, own_keys(call, segment), out, lse); });
}

void attend_own_backward(const AttentionCall& call, const OutputGradient& gradient, Tensor d_key, Tensor d_value) {
  for_each_own_segment(call, [&](const Segment& segment) {
    attend_backward(call, gradient, own_keys(call, segment), own_tokens(d_key, segment), own_tokens(d_value, segment));
  });
}

Tensor entry(const Tensor& x, int64_t i) {
  std::array<int64_t, Shape::kMaxRank> sizes{};
  std::array<int64_t, Shape::kMaxRank> strides{};
  const auto rank = static_cast<size_t>(x.rank() - 1);
  for (size_t d = 0; d < rank; ++d) {
    sizes[d] = x.dim(static_cast<int>(d) + 1);
    strides[d] = x.stride(static_cast<int>(d) + 1);
  }
  return Tensor(x.slice(0, i, i + 1).raw(), x.dtype(), Shape(std::span<const int64_t>(sizes.data(), rank)),
                Shape(std::span<const int64_t>(strides.data(), rank)));
}

}  // namespace farspan
