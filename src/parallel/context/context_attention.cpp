// SPDX-License-Identifier: Apache-2.0
#include "parallel/context/context_attention.h"

#include "ops/elementwise.h"
#include "parallel/context/block_attention.h"

namespace farspan {
namespace {

std::string_view name_of(CpCommType type) {
  switch (type) {
    case CpCommType::p2p:
      return "p2p";
    case CpCommType::all_gather:
      return "all_gather";
    case CpCommType::a2a:
      return "a2a";
    case CpCommType::a2a_p2p:
      return "a2a+p2p";
    case CpCommType::automatic:
      return "auto";
  }
  return "?";
}

void check_tensor(std::string_view name, const Tensor& x, DType dtype, const Shape& shape) {
  FARSPAN_CHECK(x.dtype() == dtype && x.shape() == shape && x.stride(-1) == 1,
                "context attention: {} is {} {} (last stride {}), expected {} {} (last stride 1)", name,
                name_of(x.dtype()), x.shape().str(), x.stride(-1), name_of(dtype), shape.str());
}

// The shapes every call has: queries, keys and values of s local tokens of B rows, and a mask for them.
AttentionCall checked_call(Device& device, Arena& arena, Communicator& cp, const SequenceLayout& layout,
                           const ContextAttentionShape& shape, const BatchMask& mask, const Tensor& query,
                           const Tensor& key, const Tensor& value) {
  FARSPAN_CHECK(query.rank() == 4 && (query.dtype() == DType::f32 || query.dtype() == DType::bf16),
                "context attention: query is {} {}, expected (B, s, A, D) of f32 or bf16", name_of(query.dtype()),
                query.shape().str());
  const int64_t rows = query.dim(0);
  const int64_t tokens = layout.local_length();
  check_tensor("query", query, query.dtype(), {rows, tokens, shape.heads, shape.head_dim});
  check_tensor("key", key, query.dtype(), {rows, tokens, shape.kv_heads, shape.head_dim});
  check_tensor("value", value, query.dtype(), {rows, tokens, shape.kv_heads, shape.head_dim});
  check_tensor("mask.lo", mask.lo, DType::i64, {rows, tokens});
  check_tensor("mask.hi", mask.hi, DType::i64, {rows, tokens});
  FARSPAN_CHECK(std::ssize(mask.rows) == rows, "context attention: masks of {} rows for {} rows", mask.rows.size(),
                rows);
  return {device, arena, cp, layout, shape, mask, query, key, value};
}

}  // namespace

ContextAttention::ContextAttention(Communicator& cp, const SequenceLayout& layout, ContextAttentionShape shape,
                                   CpCommType comm_type)
    : cp_(cp), layout_(layout), shape_(shape), comm_type_(comm_type) {
  if (comm_type != CpCommType::p2p && comm_type != CpCommType::all_gather)
    throw ConfigError(fmt::format("cp_comm_type: {} found; this version has p2p and all_gather", name_of(comm_type)));
  FARSPAN_CHECK(cp.size() == layout.cp(), "context attention: a group of {} ranks, a layout for {}", cp.size(),
                layout.cp());
  FARSPAN_CHECK(shape.kv_heads > 0 && shape.head_dim > 0 && shape.heads > 0 && shape.heads % shape.kv_heads == 0,
                "context attention: {} heads of size {} over {} key/value heads; heads must be a multiple", shape.heads,
                shape.head_dim, shape.kv_heads);
}

void ContextAttention::forward(Device& device, Arena& arena, const BatchMask& mask, const Tensor& query,
                               const Tensor& key, const Tensor& value, Tensor out, Tensor lse) const {
  const AttentionCall call = checked_call(device, arena, cp_, layout_, shape_, mask, query, key, value);
  check_tensor("out", out, query.dtype(), query.shape());
  check_tensor("lse", lse, DType::f32, {call.rows(), shape_.heads, layout_.local_length()});

  // The running output is fp32 until the last key has been seen; in fp32 it is the output itself.
  const bool rounds = query.dtype() != DType::f32;
  Buffer running;
  if (rounds) running = arena.take("attention.running_out", DType::f32, query.shape(), Purpose::workspace);
  const Tensor state = rounds ? running.tensor() : out;
  start_state(call, state, lse);

  if (cp_.size() == 1)
    local_forward(call, state, lse);
  else if (comm_type_ == CpCommType::p2p)
    ring_forward(call, state, lse);
  else
    all_gather_forward(call, state, lse);
  if (rounds) cast(device, state, out);
}

void ContextAttention::backward(Device& device, Arena& arena, const BatchMask& mask, const Tensor& query,
                                const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse,
                                const Tensor& d_out, Tensor d_query, Tensor d_key, Tensor d_value) const {
  const AttentionCall call = checked_call(device, arena, cp_, layout_, shape_, mask, query, key, value);
  check_tensor("out", out, query.dtype(), query.shape());
  check_tensor("lse", lse, DType::f32, {call.rows(), shape_.heads, layout_.local_length()});
  check_tensor("d_out", d_out, query.dtype(), query.shape());
  check_tensor("d_query", d_query, query.dtype(), query.shape());
  check_tensor("d_key", d_key, query.dtype(), key.shape());
  check_tensor("d_value", d_value, query.dtype(), value.shape());

  const bool rounds = query.dtype() != DType::f32;
  Buffer d_query_sum;
  if (rounds) d_query_sum = arena.take("attention.d_query_sum", DType::f32, query.shape(), Purpose::workspace);
  const Buffer delta = arena.take("attention.delta", DType::f32, lse.shape(), Purpose::workspace);
  const OutputGradient gradient{d_out, lse, delta, rounds ? d_query_sum.tensor() : d_query};
  fill(device, gradient.d_query, 0);
  write_delta(call, out, gradient);

  if (cp_.size() == 1)
    local_backward(call, gradient, d_key, d_value);
  else if (comm_type_ == CpCommType::p2p)
    ring_backward(call, gradient, d_key, d_value);
  else
    all_gather_backward(call, gradient, d_key, d_value);
  if (rounds) cast(device, gradient.d_query, d_query);
}

void local_forward(const AttentionCall& call, Tensor out, Tensor lse) {
  attend_forward(call, 0, {0, call.layout.local_length()}, call.key, call.value, out, lse);
}

void local_backward(const AttentionCall& call, const OutputGradient& gradient, Tensor d_key, Tensor d_value) {
  const Span all{0, call.layout.local_length()};
  if (call.dtype() == DType::f32) {
    fill(call.device, d_key, 0);
    fill(call.device, d_value, 0);
    attend_backward(call, gradient, 0, all, call.key, call.value, d_key, d_value);
    return;
  }
  const Buffer sum =
      call.arena.take("attention.d_key_value_sum", DType::f32, call.packed_shape(all.length()), Purpose::workspace);
  zero_packed(call.device, sum);
  attend_backward(call, gradient, 0, all, call.key, call.value, packed_half(sum, 0), packed_half(sum, 1));
  unpack(call.device, sum, d_key, d_value);
}

}  // namespace farspan
