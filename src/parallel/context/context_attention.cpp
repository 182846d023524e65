// SPDX-License-Identifier: Apache-2.0
#include "parallel/context/context_attention.h"

#include <array>

#include "config/names.h"
#include "device/host_access.h"
#include "ops/elementwise.h"
#include "parallel/context/block_attention.h"
#include "parallel/context/head_exchange.h"
#include "parallel/context/hierarchy.h"
#include "parallel/context/key_schedule.h"
#include "parallel/context/late_queries.h"
#include "parallel/context/recorded_calls.h"
#include "parallel/deal.h"

namespace farspan {
namespace {

void check_tensor(std::string_view name, const Tensor& x, DType dtype, const Shape& shape) {
  FARSPAN_CHECK(x.dtype() == dtype && x.shape() == shape && x.stride(-1) == 1,
                "context attention: {} is {} {} (last stride {}), expected {} {} (last stride 1)", name,
                name_of(x.dtype()), x.shape().str(), x.stride(-1), name_of(dtype), shape.str());
}

// Where sums in a shorter type than fp32 are made: in a buffer of their own, and rounded once.
class Fp32Sum {
 public:
  Fp32Sum(Arena& arena, std::string_view name, const Tensor& rounded) : rounded_(rounded) {
    if (rounded.dtype() != DType::f32) sum_ = arena.take(name, DType::f32, rounded.shape(), Purpose::workspace);
  }
  const Tensor& tensor() const { return sum_.taken() ? sum_.tensor() : rounded_; }
  void round(Device& device) const {
    if (sum_.taken()) cast(device, sum_, rounded_);
  }

 private:
  Tensor rounded_;
  Buffer sum_;
};

// The rows as they are after heads were traded: the tokens of a group of ranks together.
struct TradedRows {
  std::vector<RowLayout> layouts;  // (B), over groups
  Buffer lo, hi;                   // (B, n s)

  TradedRows(Device& device, Arena& arena, const BatchMask& mask, int members, int group) {
    for (const RowLayout& layout : mask.layouts) layouts.push_back(merge_ranks(layout, members));
    const int64_t B = std::ssize(layouts);
    const int64_t tokens = layouts[0].local_length();
    lo = arena.take("attention.whole_lo", DType::i64, {B, tokens}, Purpose::workspace);
    hi = arena.take("attention.whole_hi", DType::i64, {B, tokens}, Purpose::workspace);
    const double bytes = static_cast<double>(lo.tensor().bytes() + hi.tensor().bytes());
    device.run({"visible_intervals", OpClass::memory, 0, bytes}, [&] {
      HostFilled host_lo(device, lo), host_hi(device, hi);
      const auto row = [&](const HostFilled& x, int64_t b) {
        return std::span<int64_t>(x.tensor().data<int64_t>() + b * tokens, static_cast<size_t>(tokens));
      };
      for (int64_t b = 0; b < B; ++b)
        deal_mask(layouts[static_cast<size_t>(b)], group, mask.rows[static_cast<size_t>(b)], row(host_lo, b),
                  row(host_hi, b));
      host_lo.send();
      host_hi.send();
    });
  }
};

ContextAttentionShape traded_shape(const ContextAttentionShape& shape, const HeadExchange& heads) {
  ContextAttentionShape traded = shape;
  traded.heads = heads.heads();
  traded.kv_heads = heads.kv_heads();
  traded.first_head += heads.heads_of(heads.member()).begin;
  return traded;
}

// Query, key and value heads, side by side in one tensor (B, n s, A' + 2 K' [+ A' [+ A']], D): those behind are d_out's
// and out's.
struct TradedHeads {
  Tensor query, key, value, d_out, out;
  TradedHeads(const Tensor& whole, int64_t heads, int64_t kv_heads) {
    int64_t begin = 0;
    const auto take = [&](Tensor& part, int64_t count) {
      if (begin < whole.dim(2)) part = whole.slice(2, begin, begin + count);
      begin += count;
    };
    take(query, heads);
    take(key, kv_heads);
    take(value, kv_heads);
    take(d_out, heads);
    take(out, heads);
  }
};

}  // namespace

ContextAttention::ContextAttention(const ContextGroups& groups, const SequenceLayout& layout,
                                   ContextAttentionShape shape, CpCommType comm_type, AllGatherOptions all_gather,
                                   RecordedCalls* recorded)
    : groups_(groups),
      layout_(layout),
      shape_(shape),
      comm_type_(comm_type),
      all_gather_(all_gather),
      recorded_(recorded) {
  FARSPAN_CHECK(groups.cp != nullptr && groups.cp->size() == layout.cp(),
                "context attention: a group of {} ranks, a layout for {}", groups.cp == nullptr ? 0 : groups.cp->size(),
                layout.cp());
  FARSPAN_CHECK(shape.kv_heads > 0 && shape.head_dim > 0 && shape.heads > 0 && shape.heads % shape.kv_heads == 0,
                "context attention: {} heads of size {} over {} key/value heads; heads must be a multiple", shape.heads,
                shape.head_dim, shape.kv_heads);
  FARSPAN_CHECK(comm_type != CpCommType::automatic, "context attention: cp_comm_type auto has not been resolved");
  if (comm_type == CpCommType::p2p || comm_type == CpCommType::all_gather) {
    key_group_ = groups.cp;
  } else if (comm_type == CpCommType::a2a) {
    head_group_ = groups.cp;
  } else {
    FARSPAN_CHECK(groups.inner != nullptr && groups.outer != nullptr, "context attention: a2a+p2p without its groups");
    FARSPAN_CHECK(groups.inner->size() * groups.outer->size() == groups.cp->size() &&
                      groups.inner->rank() == groups.cp->rank() % groups.inner->size() &&
                      groups.outer->rank() == groups.cp->rank() / groups.inner->size(),
                  "context attention: rank {} of {} is rank {} of {} inside and {} of {} outside", groups.cp->rank(),
                  groups.cp->size(), groups.inner->rank(), groups.inner->size(), groups.outer->rank(),
                  groups.outer->size());
    head_group_ = groups.inner;
    key_group_ = groups.outer;
  }
  if (head_group_ == nullptr) return;
  if (const auto reason = refuse_a2a(shape.heads, shape.kv_heads, head_group_->size())) throw ConfigError(*reason);
  if (head_group_->size() == 1) head_group_ = nullptr;
}

struct ContextAttention::Inputs {
  Device& device;
  Arena& arena;
  const BatchMask& mask;
  const AttentionDropout& dropout;
  const Tensor& query;
  const Tensor& key;
  const Tensor& value;

  AttentionCall call(Communicator* key_group, const ContextAttentionShape& shape) const {
    return {device, arena, key_group, {mask.layouts, mask.rows}, shape, dropout, mask.row_ids, mask.lo, mask.hi,
            query,  key,   value};
  }
  // The same rows after heads were traded.
  AttentionCall call(Communicator* key_group, const ContextAttentionShape& shape, const TradedRows& rows,
                     const TradedHeads& heads) const {
    return {device,  arena,       key_group,    {rows.layouts, mask.rows},
            shape,   dropout,     mask.row_ids, rows.lo,
            rows.hi, heads.query, heads.key,    heads.value};
  }
};

struct ContextAttention::Gradients {
  const Tensor& out;
  const Tensor& d_out;
  Tensor d_query;
  Tensor d_key;
  Tensor d_value;
};

// The shapes every call has: queries, keys and values of s local tokens of B rows, and a mask for them.
void ContextAttention::check(const Inputs& x) const {
  FARSPAN_CHECK(x.query.rank() == 4 && (x.query.dtype() == DType::f32 || x.query.dtype() == DType::bf16),
                "context attention: query is {} {}, expected (B, s, A, D) of f32 or bf16", name_of(x.query.dtype()),
                x.query.shape().str());
  const int64_t rows = x.query.dim(0);
  const int64_t tokens = layout_.local_length();
  check_tensor("query", x.query, x.query.dtype(), {rows, tokens, shape_.heads, shape_.head_dim});
  check_tensor("key", x.key, x.query.dtype(), {rows, tokens, shape_.kv_heads, shape_.head_dim});
  check_tensor("value", x.value, x.query.dtype(), {rows, tokens, shape_.kv_heads, shape_.head_dim});
  check_tensor("mask.lo", x.mask.lo, DType::i64, {rows, tokens});
  check_tensor("mask.hi", x.mask.hi, DType::i64, {rows, tokens});
  FARSPAN_CHECK(std::ssize(x.mask.rows) == rows && std::ssize(x.mask.layouts) == rows,
                "context attention: masks of {} rows and layouts of {} for {} rows", x.mask.rows.size(),
                x.mask.layouts.size(), rows);
  for (const RowLayout& row : x.mask.layouts)
    FARSPAN_CHECK(row.cp() == layout_.cp() && row.local_length() == tokens,
                  "context attention: a row of {} tokens on each of {} ranks, expected {} on {}", row.local_length(),
                  row.cp(), tokens, layout_.cp());
  FARSPAN_CHECK(x.dropout.probability == 0 || std::ssize(x.mask.row_ids) == rows,
                "context attention: dropout needs the ids of {} rows, found {}", rows, x.mask.row_ids.size());
}

KeySchedule ContextAttention::schedule_of(const AttentionCall& call, Pass pass) const {
  if (call.ranks() == 1) return {};
  return comm_type_ == CpCommType::all_gather ? all_gather_schedule(call, pass, all_gather_) : p2p_schedule(call, pass);
}

bool ContextAttention::writes_results(const Device& device) const {
  return attention_writes_rounded(device) && (key_group_ == nullptr || key_group_->size() == 1);
}

void ContextAttention::forward(Device& device, Arena& arena, const BatchMask& mask, const AttentionDropout& dropout,
                               const Tensor& query, const Tensor& key, const Tensor& value, Tensor out,
                               Tensor lse) const {
  const Inputs x{device, arena, mask, dropout, query, key, value};
  check(x);
  check_tensor("out", out, query.dtype(), query.shape());
  check_tensor("lse", lse, DType::f32, {query.dim(0), shape_.heads, query.dim(1)});
  const auto run = [&] {
    if (head_group_ == nullptr)
      forward_own_heads(x, out, lse);
    else
      forward_traded_heads(x, out, lse);
  };
  if (recorded_ == nullptr) return run();
  recorded_->run(Pass::forward, mask, dropout.probability, query.dtype(), run);
}

void ContextAttention::forward_own_heads(const Inputs& x, const Tensor& out, const Tensor& lse) const {
  AttentionCall call = x.call(key_group_, shape_);
  call.prepare(Pass::forward);
  const KeySchedule schedule = schedule_of(call, Pass::forward);
  if (writes_results(x.device)) return run_forward(call, schedule, {}, out, lse);
  const LateQueries late(call, schedule);
  const Fp32Sum state(x.arena, "attention.running_out", out);  // taken for every mask: memory is planned before any
  if (late.any() && attention_writes_rounded(x.device)) return run_forward(call, schedule, late, out, lse);
  run_forward(call, schedule, late, state.tensor(), lse);
  state.round(x.device);
}

void ContextAttention::forward_traded_heads(const Inputs& x, const Tensor& out, const Tensor& lse) const {
  const int n = head_group_->size();
  const int group = groups_.cp->rank() / n;
  const HeadExchange heads(x.device, x.arena, *head_group_, x.mask.layouts, group * n, shape_);
  const std::array parts{HeadExchange::Part{x.query, &HeadExchange::heads_of},
                         HeadExchange::Part{x.key, &HeadExchange::kv_heads_of},
                         HeadExchange::Part{x.value, &HeadExchange::kv_heads_of}};
  Buffer inputs = heads.to_heads("attention forward query/key/value", parts);
  const TradedHeads traded(inputs, heads.heads(), heads.kv_heads());
  const DType state_dtype = writes_results(x.device) ? out.dtype() : DType::f32;
  const Buffer state = x.arena.take("attention.running_out", state_dtype, traded.query.shape(), Purpose::workspace);
  const Buffer state_lse = x.arena.take("attention.running_lse", DType::f32,
                                        {x.query.dim(0), heads.heads(), heads.tokens()}, Purpose::workspace);
  {
    const TradedRows rows(x.device, x.arena, x.mask, n, group);
    AttentionCall call = x.call(key_group_, traded_shape(shape_, heads), rows, traded);
    call.prepare(Pass::forward);
    const KeySchedule schedule = schedule_of(call, Pass::forward);
    run_forward(call, schedule, LateQueries(call, schedule), state, state_lse);
  }
  inputs.release();
  heads.heads_to_tokens("attention forward out", state, out);
  heads.scalars_to_tokens("attention forward log-sum-exp", state_lse, lse);
}

void ContextAttention::backward(Device& device, Arena& arena, const BatchMask& mask, const AttentionDropout& dropout,
                                const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
                                const Tensor& lse, const Tensor& d_out, Tensor d_query, Tensor d_key,
                                Tensor d_value) const {
  const Inputs x{device, arena, mask, dropout, query, key, value};
  check(x);
  check_tensor("out", out, query.dtype(), query.shape());
  check_tensor("lse", lse, DType::f32, {query.dim(0), shape_.heads, query.dim(1)});
  check_tensor("d_out", d_out, query.dtype(), query.shape());
  check_tensor("d_query", d_query, query.dtype(), query.shape());
  check_tensor("d_key", d_key, query.dtype(), key.shape());
  check_tensor("d_value", d_value, query.dtype(), value.shape());
  const Gradients d{out, d_out, d_query, d_key, d_value};
  const auto run = [&] { run_backward_pass(x, d, lse); };
  if (recorded_ == nullptr) return run();
  recorded_->run(Pass::backward, mask, dropout.probability, query.dtype(), run);
}

void ContextAttention::run_backward_pass(const Inputs& x, const Gradients& d, const Tensor& lse) const {
  // A GPU's attention makes delta from out where it needs it. Traded, delta is less to move than out, and out is only
  // moved for the implementation that reads it, cuDNN's.
  const bool reads_out =
      attention_writes_rounded(x.device) && (head_group_ == nullptr || x.query.dtype() == DType::bf16);
  Buffer delta;
  if (!reads_out) {
    delta = x.arena.take("attention.delta", DType::f32, lse.shape(), Purpose::workspace);
    write_delta(x.device, d.out, d.d_out, delta.tensor());
  }
  if (head_group_ == nullptr)
    backward_own_heads(x, d, lse, delta);
  else
    backward_traded_heads(x, d, lse, std::move(delta));
}

// Where delta is not known and several blocks meet the same queries, each would make it anew.
Buffer ContextAttention::room_for_delta(const Inputs& x, OutputGradient& gradient) const {
  if (gradient.delta.defined() || writes_results(x.device)) return {};
  Buffer room = x.arena.take("attention.delta", DType::f32, gradient.lse.shape(), Purpose::workspace);
  gradient.delta = room;
  gradient.has_delta = false;
  return room;
}

void ContextAttention::backward_own_heads(const Inputs& x, const Gradients& d, const Tensor& lse,
                                          const Tensor& delta) const {
  AttentionCall call = x.call(key_group_, shape_);
  call.prepare(Pass::backward);
  OutputGradient gradient{delta.defined() ? Tensor() : d.out, d.d_out, lse, delta, d.d_query};
  const KeySchedule schedule = schedule_of(call, Pass::backward);
  if (writes_results(x.device)) return run_backward(call, schedule, gradient, d.d_key, d.d_value);
  const Buffer room = room_for_delta(x, gradient);
  const Fp32Sum d_query(x.arena, "attention.d_query_sum", d.d_query);
  gradient.d_query = d_query.tensor();
  run_backward(call, schedule, gradient, d.d_key, d.d_value);
  d_query.round(x.device);
}

void ContextAttention::backward_traded_heads(const Inputs& x, const Gradients& d, const Tensor& lse,
                                             Buffer delta) const {
  const int n = head_group_->size();
  const int group = groups_.cp->rank() / n;
  const HeadExchange heads(x.device, x.arena, *head_group_, x.mask.layouts, group * n, shape_);
  std::vector parts{
      HeadExchange::Part{x.query, &HeadExchange::heads_of}, HeadExchange::Part{x.key, &HeadExchange::kv_heads_of},
      HeadExchange::Part{x.value, &HeadExchange::kv_heads_of}, HeadExchange::Part{d.d_out, &HeadExchange::heads_of}};
  std::vector<Tensor> local_scalars{lse};
  if (delta.taken())
    local_scalars.push_back(delta);
  else
    parts.push_back({d.out, &HeadExchange::heads_of});
  Buffer inputs = heads.to_heads("attention backward query/key/value/d_out", parts);
  const TradedHeads traded(inputs, heads.heads(), heads.kv_heads());
  std::vector<Buffer> scalars = heads.scalars_to_heads("attention backward log-sum-exp/delta", local_scalars);
  delta.release();
  const int64_t K = heads.kv_heads();
  const DType sum_dtype = writes_results(x.device) ? x.query.dtype() : DType::f32;
  const Buffer d_query = x.arena.take("attention.d_query_sum", sum_dtype, traded.query.shape(), Purpose::workspace);
  const Buffer d_key_value = x.arena.take("attention.d_key_value_sum", heads.shares_kv_heads() ? DType::f32 : sum_dtype,
                                          {x.query.dim(0), heads.tokens(), 2 * K, shape_.head_dim}, Purpose::workspace);
  {
    const TradedRows rows(x.device, x.arena, x.mask, n, group);
    AttentionCall call = x.call(key_group_, traded_shape(shape_, heads), rows, traded);
    call.prepare(Pass::backward);
    const Tensor traded_delta = scalars.size() > 1 ? scalars[1].tensor() : Tensor();
    OutputGradient gradient{traded.out, traded.d_out, scalars[0], traded_delta, d_query};
    const Buffer room = room_for_delta(x, gradient);
    run_backward(call, schedule_of(call, Pass::backward), gradient, d_key_value.tensor().slice(2, 0, K),
                 d_key_value.tensor().slice(2, K, 2 * K));
  }
  scalars.clear();
  inputs.release();
  heads.heads_to_tokens("attention backward d_query", d_query, d.d_query);
  heads.key_gradients_to_tokens("attention backward d_key/d_value", d_key_value, d.d_key, d.d_value);
}

}  // namespace farspan
