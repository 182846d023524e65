// SPDX-License-Identifier: Apache-2.0
#include "ops/attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "base/math.h"
#include "ops/attention_implementation.h"
#include "ops/cpu/attention_cpu.h"
#include "ops/cpu/attention_kernels.h"
#include "ops/cuda/attention.h"
#include "ops/cuda/attention_scratch.h"
#include "ops/cuda/ops.h"
#include "ops/dropout_rule.h"
#include "ops/key_intervals.h"
#include "ops/ref/attention_ref.h"

namespace farspan {
namespace {

// The queries whose results a block begins: all, or the ascending spans of those that see any of its keys. Reads lo and
// hi.
std::vector<QueryRange> begun_queries(const AttentionBlock& block) {
  const int64_t queries = block.query.dim(0);
  if (!block.keeps_blind) return {{0, queries}};
  std::vector<QueryRange> seeing;
  for (int64_t i = 0; i < queries; ++i) {
    const int64_t lo = std::max(block.lo.data<int64_t>()[i * block.lo.stride(0)], block.key_begin);
    const int64_t hi = std::min(block.hi.data<int64_t>()[i * block.hi.stride(0)], block.key_begin + block.key.dim(0));
    if (lo >= hi) continue;
    if (seeing.empty() || seeing.back().end != i) seeing.push_back({i, i});
    seeing.back().end = i + 1;
  }
  return seeing;
}

// An implementation for the CPU, which is told of blocks only: state and gradients are fp32 and are added to.
template <auto declines_block, auto run_forward, auto run_backward>
constexpr AttentionImplementation on_cpu(std::string_view name) {
  return {name, [](Device&, const AttentionForward& call) { return std::string(declines_block(call.block)); },
          [](Device&, const AttentionBackward& call) { return std::string(declines_block(call.block)); },
          [](Device& device, const AttentionForward& call) {
            if (call.use == StateUse::begin)
              for (const QueryRange& queries : begun_queries(call.block))
                cpu::attention_state_init(device, call.out.slice(0, queries.begin, queries.end),
                                          call.lse.slice(1, queries.begin, queries.end));
            run_forward(device, call.block, call.out, call.lse);
          },
          [](Device& device, const AttentionBackward& call) {
            if (call.d_query_use == Accumulate::no)
              for (const QueryRange& queries : begun_queries(call.block))
                cpu::zero_heads(device, call.d_query.slice(0, queries.begin, queries.end));
            if (call.d_key_value_use == Accumulate::no) {
              cpu::zero_heads(device, call.d_key);
              cpu::zero_heads(device, call.d_value);
            }
            run_backward(device, call.block, call.d_out, call.lse, call.delta, call.d_query, call.d_key, call.d_value);
          }};
}

constexpr auto declines_nothing = [](const AttentionBlock&) { return ""; };

constexpr std::array kCpuImplementations = {
    on_cpu<cpu::attention_kernel_declines, cpu::attention_kernel_forward, cpu::attention_kernel_backward>("vector"),
    on_cpu<declines_nothing, ref::attention_forward, ref::attention_backward>("reference"),
};

bool verbose() {
  static const bool on = [] {
    const char* value = std::getenv("FARSPAN_VERBOSE");
    return value != nullptr && std::string_view(value) != "" && std::string_view(value) != "0";
  }();
  return on;
}

// The first implementation of the device's list that does not decline, by `declines(implementation)`.
template <typename Declines>
const AttentionImplementation& choose(const Device& device, std::string_view op, const AttentionBlock& block,
                                      Declines&& declines) {
  std::string reasons;
  for (const AttentionImplementation& implementation : attention_implementation_list(device.kind())) {
    const std::string reason = declines(implementation);
    if (reason.empty()) {
      if (verbose())
        fmt::print(stderr, "farspan: {} query {} key {} {}: {}\n", op, block.query.shape().str(),
                   block.key.shape().str(), name_of(block.query.dtype()), implementation.name);
      return implementation;
    }
    if (verbose()) fmt::print(stderr, "farspan: {}: {} declines: {}\n", op, implementation.name, reason);
    reasons += fmt::format("; {}: {}", implementation.name, reason);
  }
  throw InternalError(fmt::format("{}: every implementation declined{}", op, reasons));
}

bool float_type(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16; }

// `x` must be (rows, heads, D) of `dtype` with neighbouring elements in its last dimension.
void check_heads(std::string_view op, std::string_view name, const Tensor& x, const Shape& shape, DType dtype) {
  FARSPAN_CHECK(x.shape() == shape, "{}: {} is {}, needs {}", op, name, x.shape().str(), shape.str());
  FARSPAN_CHECK(x.dtype() == dtype, "{}: {} holds {}, needs {}", op, name, name_of(x.dtype()), name_of(dtype));
  FARSPAN_CHECK(x.stride(2) == 1 || x.dim(2) <= 1, "{}: {} has stride {} in its last dimension, needs 1", op, name,
                x.stride(2));
}

// What a block adds to, or writes: like `model` in fp32, or in the model's own type where rounding is allowed.
void check_result(const Device& device, std::string_view op, std::string_view name, const Tensor& x,
                  const Tensor& model, bool complete) {
  const bool rounded = complete && attention_writes_rounded(device) && x.dtype() == model.dtype();
  check_heads(op, name, x, model.shape(), rounded ? model.dtype() : DType::f32);
}

// `x` must be (A, n) f32, one row of n neighbours per head.
void check_per_head(std::string_view op, std::string_view name, const Tensor& x, int64_t heads, int64_t queries) {
  const Shape shape{heads, queries};
  FARSPAN_CHECK(x.shape() == shape, "{}: {} is {}, needs (heads, queries) = {}", op, name, x.shape().str(),
                shape.str());
  FARSPAN_CHECK(x.dtype() == DType::f32, "{}: {} holds {}, needs f32", op, name, name_of(x.dtype()));
  FARSPAN_CHECK(x.stride(1) == 1 || queries <= 1, "{}: {} has stride {} in its last dimension, needs 1", op, name,
                x.stride(1));
}

void check_block(std::string_view op, const AttentionBlock& b) {
  FARSPAN_CHECK(b.query.rank() == 3, "{}: query is {}, needs (queries, heads, head size)", op, b.query.shape().str());
  FARSPAN_CHECK(b.key.rank() == 3, "{}: key is {}, needs (keys, key/value heads, head size)", op, b.key.shape().str());
  FARSPAN_CHECK(float_type(b.query.dtype()), "{}: query holds {}, needs f32 or bf16", op, name_of(b.query.dtype()));
  const int64_t heads = b.query.dim(1);
  const int64_t kv_heads = b.key.dim(1);
  const int64_t head_size = b.query.dim(2);
  FARSPAN_CHECK(head_size >= 1, "{}: head size 0, needs at least 1", op);
  FARSPAN_CHECK(heads == 0 || (kv_heads >= 1 && heads % kv_heads == 0),
                "{}: {} query heads over {} key/value heads; the first must be a multiple of the second", op, heads,
                kv_heads);
  check_heads(op, "query", b.query, b.query.shape(), b.query.dtype());
  const Shape key_shape{b.key.dim(0), kv_heads, head_size};
  check_heads(op, "key", b.key, key_shape, b.query.dtype());
  check_heads(op, "value", b.value, key_shape, b.query.dtype());
  for (const auto& [name, x] : {std::pair{"lo", &b.lo}, std::pair{"hi", &b.hi}}) {
    FARSPAN_CHECK(x->shape() == Shape{b.query.dim(0)}, "{}: {} is {}, needs one position a query, ({})", op, name,
                  x->shape().str(), b.query.dim(0));
    FARSPAN_CHECK(x->dtype() == DType::i64, "{}: {} holds {}, needs i64", op, name, name_of(x->dtype()));
  }
  int64_t described = 0;
  for (const VisibleRun& run : b.runs) {
    FARSPAN_CHECK(run.first == described && run.count > 0, "{}: a run of {} queries from {} on, after {} queries", op,
                  run.count, run.first, described);
    described += run.count;
  }
  FARSPAN_CHECK(b.runs.empty() || described == b.query.dim(0), "{}: runs of {} queries, needs {}", op, described,
                b.query.dim(0));
  FARSPAN_CHECK(std::isfinite(b.scale), "{}: scale {}, needs a finite number such as {}", op, b.scale,
                1 / std::sqrt(static_cast<double>(head_size)));
  const int64_t all_pairs = checked_mul(b.query.dim(0), b.key.dim(0));
  FARSPAN_CHECK(b.visible_pairs >= -1 && b.visible_pairs <= all_pairs,
                "{}: {} visible pairs in a block of {} x {}; needs 0 to {}, or -1 for all", op, b.visible_pairs,
                b.query.dim(0), b.key.dim(0), all_pairs);
  if (b.dropout.probability == 0) return;
  DropoutRule{b.dropout.probability};  // throws
  FARSPAN_CHECK(b.query_begin >= 0 && b.key_begin >= 0, "{}: positions from {} and {} on; dropout needs 0 or more", op,
                b.query_begin, b.key_begin);
}

// (query, key) pairs times query heads.
double head_pairs(const AttentionBlock& b) {
  const double pairs = b.visible_pairs >= 0 ? static_cast<double>(b.visible_pairs)
                                            : static_cast<double>(b.query.dim(0)) * static_cast<double>(b.key.dim(0));
  return pairs * static_cast<double>(b.query.dim(1));
}

double input_bytes(const AttentionBlock& b) {
  return static_cast<double>(b.query.bytes() + b.key.bytes() + b.value.bytes() + b.lo.bytes() + b.hi.bytes());
}

void zero(Device& device, const Tensor& x) {
  if (device.on_cuda()) return cuda::fill(device, x, 0);
  cpu::zero_heads(device, x);
}

void init_state(Device& device, const Tensor& out, const Tensor& lse) {
  if (!device.on_cuda()) return cpu::attention_state_init(device, out, lse);
  cuda::fill(device, out, 0);
  cuda::fill(device, lse, -std::numeric_limits<double>::infinity());
}

bool empty(const AttentionBlock& b) { return b.query.dim(0) == 0 || b.query.dim(1) == 0 || b.key.dim(0) == 0; }

}  // namespace

std::span<const AttentionImplementation> attention_implementation_list(DeviceKind kind) {
  if (kind == DeviceKind::cuda) return cuda::attention_implementation_list();
  return kCpuImplementations;
}

int64_t scratch_bytes(const Device& device, const AttentionForward& call) {
  return device.targets_cuda() ? cuda::attention_forward_scratch(call) : 0;
}

int64_t scratch_bytes(const Device& device, const AttentionBackward& call) {
  return device.targets_cuda() ? cuda::attention_backward_scratch(call) : 0;
}

void attend_forward_by_choice(Device& device, const AttentionForward& call) {
  choose(device, "attention_block_forward", call.block, [&](const AttentionImplementation& implementation) {
    return implementation.forward_declines(device, call);
  }).forward(device, call);
}

void attend_backward_by_choice(Device& device, const AttentionBackward& call) {
  choose(device, "attention_block_backward", call.block, [&](const AttentionImplementation& implementation) {
    return implementation.backward_declines(device, call);
  }).backward(device, call);
}

std::vector<std::string> attention_implementations(DeviceKind kind) {
  std::vector<std::string> names;
  for (const AttentionImplementation& implementation : attention_implementation_list(kind))
    names.emplace_back(implementation.name);
  return names;
}

bool attention_writes_rounded(const Device& device) { return device.targets_cuda(); }

void attention_state_init(Device& device, Tensor out, Tensor lse) {
  constexpr std::string_view op = "attention_state_init";
  FARSPAN_CHECK(out.rank() == 3, "{}: out is {}, needs (queries, heads, head size)", op, out.shape().str());
  check_heads(op, "out", out, out.shape(), DType::f32);
  check_per_head(op, "lse", lse, out.dim(1), out.dim(0));
  const OpCost cost{op, OpClass::memory, 0, static_cast<double>(out.bytes() + lse.bytes())};
  device.run(cost, [&] { init_state(device, out, lse); });
}

void attention_block_forward(Device& device, const AttentionBlock& block, StateUse use, Tensor out, Tensor lse) {
  constexpr std::string_view op = "attention_block_forward";
  check_block(op, block);
  check_result(device, op, "out", out, block.query, use == StateUse::begin);
  check_per_head(op, "lse", lse, block.query.dim(1), block.query.dim(0));
  // Two products of D multiply-adds a pair: the score, and the value's share of the output.
  const double flops = 4.0 * static_cast<double>(block.query.dim(2)) * head_pairs(block);
  const double state_bytes = static_cast<double>(out.bytes() + lse.bytes());
  const double bytes = input_bytes(block) + (use == StateUse::add ? 2 : 1) * state_bytes;
  const AttentionForward call{block, use, out, lse};
  device.run({op, OpClass::attention, flops, bytes, scratch_bytes(device, call)}, [&] {
    if (!empty(block)) return attend_forward_by_choice(device, call);
    if (use == StateUse::begin && !block.keeps_blind) init_state(device, out, lse);
  });
}

void attention_delta(Device& device, const Tensor& out, const Tensor& d_out, Tensor delta) {
  constexpr std::string_view op = "attention_delta";
  FARSPAN_CHECK(out.rank() == 3, "{}: out is {}, needs (queries, heads, head size)", op, out.shape().str());
  FARSPAN_CHECK(float_type(out.dtype()) && float_type(d_out.dtype()), "{}: out holds {} and d_out {}, need f32 or bf16",
                op, name_of(out.dtype()), name_of(d_out.dtype()));
  check_heads(op, "out", out, out.shape(), out.dtype());
  check_heads(op, "d_out", d_out, out.shape(), d_out.dtype());
  check_per_head(op, "delta", delta, out.dim(1), out.dim(0));
  const double flops = 2.0 * static_cast<double>(out.numel());
  const double bytes = static_cast<double>(out.bytes() + d_out.bytes() + delta.bytes());
  device.run({op, OpClass::memory, flops, bytes}, [&] {
    if (device.on_cuda()) return cuda::attention_delta(device, out, d_out, delta);
    cpu::attention_delta(device, out, d_out, delta);
  });
}

bool attention_reads_delta(const Device& device, const AttentionBlock& block) {
  if (device.on_cuda()) return cuda::attention_reads_delta(device, block);
  return !device.targets_cuda() || block.query.dtype() == DType::f32;
}

void attention_block_backward(Device& device, const AttentionBlock& block, const Tensor& out, const Tensor& d_out,
                              const Tensor& lse, const Tensor& delta, Accumulate d_query_use,
                              Accumulate d_key_value_use, Tensor d_query, Tensor d_key, Tensor d_value) {
  constexpr std::string_view op = "attention_block_backward";
  check_block(op, block);
  if (out.defined()) check_heads(op, "out", out, block.query.shape(), block.query.dtype());
  check_heads(op, "d_out", d_out, block.query.shape(), block.query.dtype());
  check_per_head(op, "lse", lse, block.query.dim(1), block.query.dim(0));
  if (delta.defined() || !out.defined() || !device.targets_cuda())
    check_per_head(op, "delta", delta, block.query.dim(1), block.query.dim(0));
  check_result(device, op, "d_query", d_query, block.query, d_query_use == Accumulate::no);
  check_result(device, op, "d_key", d_key, block.key, d_key_value_use == Accumulate::no);
  check_result(device, op, "d_value", d_value, block.key, d_key_value_use == Accumulate::no);
  // Five products a pair: the score again, d_value, d_probability, d_query, d_key.
  const double flops = 10.0 * static_cast<double>(block.query.dim(2)) * head_pairs(block);
  const auto touched = [](Accumulate use, const Tensor& x) {
    return (use == Accumulate::yes ? 2.0 : 1.0) * static_cast<double>(x.bytes());
  };
  const double bytes = input_bytes(block) + static_cast<double>(d_out.bytes() + lse.bytes() + lse.bytes()) +
                       touched(d_query_use, d_query) + touched(d_key_value_use, d_key) +
                       touched(d_key_value_use, d_value);
  const AttentionBackward call{block, out, d_out, lse, delta, d_query_use, d_key_value_use, d_query, d_key, d_value};
  device.run({op, OpClass::attention, flops, bytes, scratch_bytes(device, call)}, [&] {
    if (!empty(block)) return attend_backward_by_choice(device, call);
    if (d_query_use == Accumulate::no && !block.keeps_blind) zero(device, d_query);
    if (d_key_value_use == Accumulate::no) {
      zero(device, d_key);
      zero(device, d_value);
    }
  });
}

void attention_plan_scratch(Device& device, const AttentionBlock& largest) {
  if (!device.dry()) return;
  check_block("attention_plan_scratch", largest);
  const auto in_f32 = [](const Tensor& x) { return Tensor(x.raw(), DType::f32, x.shape()); };
  const Tensor of_queries = in_f32(largest.query);
  const Tensor of_keys = in_f32(largest.key);
  const Tensor per_head(largest.query.raw(), DType::f32, {largest.query.dim(1), largest.query.dim(0)});
  device.plan_scratch(scratch_bytes(device, AttentionForward{largest, StateUse::add, of_queries, per_head}));
  device.plan_scratch(scratch_bytes(device, AttentionBackward{largest,
                                                              largest.query,
                                                              largest.query,
                                                              per_head,
                                                              {},
                                                              Accumulate::yes,
                                                              Accumulate::yes,
                                                              of_queries,
                                                              of_keys,
                                                              of_keys}));
}

}  // namespace farspan
