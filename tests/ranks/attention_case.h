// SPDX-License-Identifier: Apache-2.0
// One attention problem over whole rows, solved two ways: by a dense fp64 oracle that asks pair by pair who may see
// whom, and by ContextAttention on thread ranks, whose pieces are gathered back into row order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/philox.h"
#include "comm/dry/dry_communicator.h"
#include "comm/threads/thread_world.h"
#include "config/names.h"
#include "parallel/balanced_layout.h"
#include "parallel/context/context_attention.h"
#include "parallel/context/hierarchy.h"
#include "parallel/deal.h"
#include "tests/device.h"

namespace farspan::test {

struct AttentionCase {
  int64_t seq_length = 16;
  int64_t heads = 4;
  int64_t kv_heads = 2;
  int64_t head_dim = 8;
  double scale = 0;                          // 0: 1 / sqrt(head_dim)
  std::vector<std::vector<Span>> documents;  // per row
  MaskRule rule = {};

  int64_t rows() const { return std::ssize(documents); }
  float scale_used() const {
    return static_cast<float>(scale != 0 ? scale : 1 / std::sqrt(static_cast<double>(head_dim)));
  }
};

// Documents of the given lengths, one after the other from position 0.
inline std::vector<Span> documents_of(std::initializer_list<int64_t> lengths) {
  std::vector<Span> documents;
  int64_t begin = 0;
  for (int64_t length : lengths) {
    documents.push_back({begin, begin + length});
    begin += length;
  }
  return documents;
}

// The mask's meaning for one pair, written without intervals.
inline bool may_see(const AttentionCase& c, int64_t row, int64_t q, int64_t k) {
  for (Span d : c.documents[static_cast<size_t>(row)]) {
    if (q < d.begin || q >= d.end || k < d.begin || k >= d.end) continue;
    if (k - d.begin < c.rule.prefix) return true;
    if (c.rule.causal && k > q) return false;
    return c.rule.window == 0 || std::abs(q - k) < c.rule.window;
  }
  return false;
}

// Whole rows: query, d_out (B, S, A, D); key, value (B, S, K, D).
struct AttentionInputs {
  std::vector<float> query, key, value, d_out;
};

// Whole rows: out, d_query (B, S, A, D); lse (B, A, S); d_key, d_value (B, S, K, D).
struct AttentionValues {
  std::vector<double> out, lse, d_query, d_key, d_value;
};

inline size_t at(int64_t row, int64_t q, int64_t head, int64_t d, int64_t seq_length, int64_t heads, int64_t head_dim) {
  return static_cast<size_t>(((row * seq_length + q) * heads + head) * head_dim + d);
}

inline std::vector<float> normal_values(std::string_view stream, int64_t count, DType dtype) {
  const Philox philox(7, stream);
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(philox.normal(i));
    if (dtype == DType::bf16) values[i] = to_float(to_bfloat16(values[i]));
  }
  return values;
}

// Standard normal values, exact in `dtype`.
inline AttentionInputs random_inputs(const AttentionCase& c, DType dtype = DType::f32) {
  const int64_t tokens = c.rows() * c.seq_length * c.head_dim;
  return {normal_values("query", tokens * c.heads, dtype), normal_values("key", tokens * c.kv_heads, dtype),
          normal_values("value", tokens * c.kv_heads, dtype), normal_values("d_out", tokens * c.heads, dtype)};
}

// The uniform probe: queries zero, so softmax is flat and out[t] is the mean of the visible tokens' positions,
// lse[t] = ln(number of visible keys).
inline AttentionInputs uniform_probe(const AttentionCase& c) {
  AttentionInputs inputs = random_inputs(c);
  std::fill(inputs.query.begin(), inputs.query.end(), 0.0f);
  for (size_t i = 0; i < inputs.value.size(); ++i)
    inputs.value[i] = static_cast<float>(static_cast<int64_t>(i) / (c.kv_heads * c.head_dim) % c.seq_length);
  return inputs;
}

// softmax(scale q k^T) v and its gradients in fp64, one pair at a time. Equations: ops/attention.h.
inline AttentionValues dense_oracle(const AttentionCase& c, const AttentionInputs& x) {
  const int64_t group = c.heads / c.kv_heads;
  const double scale = c.scale_used();
  AttentionValues y;
  y.out.assign(x.query.size(), 0);
  y.d_query.assign(x.query.size(), 0);
  y.d_key.assign(x.key.size(), 0);
  y.d_value.assign(x.key.size(), 0);
  y.lse.assign(static_cast<size_t>(c.rows() * c.heads * c.seq_length), -std::numeric_limits<double>::infinity());
  auto dot = [&](const std::vector<float>& a, size_t i, const std::vector<float>& b, size_t j) {
    double sum = 0;
    for (size_t d = 0; d < static_cast<size_t>(c.head_dim); ++d) sum += static_cast<double>(a[i + d]) * b[j + d];
    return sum;
  };
  for (int64_t row = 0; row < c.rows(); ++row)
    for (int64_t head = 0; head < c.heads; ++head)
      for (int64_t q = 0; q < c.seq_length; ++q) {
        const size_t qi = at(row, q, head, 0, c.seq_length, c.heads, c.head_dim);
        auto key_at = [&](int64_t k) { return at(row, k, head / group, 0, c.seq_length, c.kv_heads, c.head_dim); };
        std::vector<int64_t> seen;
        for (int64_t k = 0; k < c.seq_length; ++k)
          if (may_see(c, row, q, k)) seen.push_back(k);
        if (seen.empty()) continue;
        std::vector<double> p(seen.size());
        double highest = -std::numeric_limits<double>::infinity();
        for (size_t j = 0; j < seen.size(); ++j) {
          p[j] = scale * dot(x.query, qi, x.key, key_at(seen[j]));
          highest = std::max(highest, p[j]);
        }
        double sum = 0;
        for (double score : p) sum += std::exp(score - highest);
        const double lse = highest + std::log(sum);
        y.lse[static_cast<size_t>((row * c.heads + head) * c.seq_length + q)] = lse;
        double delta = 0;
        for (size_t j = 0; j < seen.size(); ++j) {
          p[j] = std::exp(p[j] - lse);
          delta += p[j] * dot(x.d_out, qi, x.value, key_at(seen[j]));
        }
        for (size_t j = 0; j < seen.size(); ++j) {
          const size_t kj = key_at(seen[j]);
          const double ds = p[j] * (dot(x.d_out, qi, x.value, kj) - delta);
          for (size_t d = 0; d < static_cast<size_t>(c.head_dim); ++d) {
            y.out[qi + d] += p[j] * x.value[kj + d];
            y.d_value[kj + d] += p[j] * x.d_out[qi + d];
            y.d_query[qi + d] += scale * ds * x.key[kj + d];
            y.d_key[kj + d] += scale * ds * x.query[qi + d];
          }
        }
      }
  return y;
}

struct RankSetup {
  int cp = 1;
  CpCommType comm_type = CpCommType::p2p;
  CpLayout layout = CpLayout::zigzag;
  DType dtype = DType::f32;
  int groups = 1;     // independent context-parallel groups; group g has the world ranks g, g + groups, ...
  int64_t inner = 0;  // a2a+p2p: ranks that trade heads; 0: derived
  AllGatherOptions all_gather = {};
  AttentionDropout dropout = {};
};

inline std::string describe(const RankSetup& setup) {
  return fmt::format("cp {} {} {}", setup.cp, choice_name(setup.comm_type), choice_name(setup.layout));
}

// One rank's communicators for a communication type; `make` makes one from ranks within the context-parallel group.
struct RankGroups {
  std::unique_ptr<Communicator> cp, inner, outer;

  template <typename Make>
  RankGroups(const AttentionCase& c, const RankSetup& setup, int rank, Make&& make) {
    const HierarchicalSizes all = {.inner = setup.cp, .outer = 1};
    cp = make(inner_groups(all)[0]);
    if (setup.comm_type != CpCommType::a2a_p2p) return;
    std::vector<int64_t> given;
    if (setup.inner > 0) given = {setup.inner, setup.cp / setup.inner};
    const HierarchicalSizes sizes = hierarchical_sizes(given, setup.cp, c.heads, c.kv_heads);
    inner = make(inner_groups(sizes)[static_cast<size_t>(rank / sizes.inner)]);
    outer = make(outer_groups(sizes)[static_cast<size_t>(rank % sizes.inner)]);
  }
  ContextGroups view() const { return {cp.get(), inner.get(), outer.get()}; }

  // What has moved since the last call.
  Traffic take_traffic() const {
    Traffic sum;
    for (const auto* group : {&cp, &inner, &outer}) {
      if (*group == nullptr) continue;
      sum.bytes_sent += (*group)->traffic().bytes_sent;
      sum.bytes_received += (*group)->traffic().bytes_received;
      sum.calls += (*group)->traffic().calls;
      (*group)->reset_traffic();
    }
    return sum;
  }
};

struct RankRun {
  AttentionValues values;  // of the last group
  std::vector<Traffic> forward, backward;
  std::vector<MemoryPlan> plans;
  int64_t dirty_pads = 0;  // outputs of pad tokens past seq_length that are not zero (lse: not -inf)
};

class OwnedTensor {
 public:
  OwnedTensor(DType dtype, const Shape& shape)
      : memory_(static_cast<size_t>(shape.numel() * size_of(dtype))), tensor_(memory_.data(), dtype, shape) {}
  const Tensor& tensor() const { return tensor_; }

 private:
  TestVector<std::byte> memory_;
  Tensor tensor_;
};

inline int64_t element_offset(const Tensor& x, std::initializer_list<int64_t> index) {
  int64_t offset = 0;
  int dim = 0;
  for (int64_t i : index) offset += i * x.stride(dim++);
  return offset;
}

inline float get(const Tensor& x, std::initializer_list<int64_t> index) {
  const int64_t offset = element_offset(x, index);
  return x.dtype() == DType::f32 ? x.data<float>()[offset] : to_float(x.data<BFloat16>()[offset]);
}

inline void set(const Tensor& x, std::initializer_list<int64_t> index, float value) {
  const int64_t offset = element_offset(x, index);
  if (x.dtype() == DType::f32)
    x.data<float>()[offset] = value;
  else
    x.data<BFloat16>()[offset] = to_bfloat16(value);
}

// One rank's tensors. Query, key and value are views into one fused tensor, and so are their gradients. Everything is
// NaN to begin with, pad tokens stay so: nobody may look at them, and every output must be written.
class LocalAttention {
 public:
  LocalAttention(const AttentionCase& c, const RankSetup& setup, const SequenceLayout& layout, int rank)
      : case_(c),
        setup_(setup),
        layout_(layout),
        rank_(rank),
        qkv_(setup.dtype, fused_shape()),
        d_qkv_(setup.dtype, fused_shape()),
        out_(setup.dtype, {c.rows(), layout.local_length(), c.heads, c.head_dim}),
        d_out_(setup.dtype, out_.tensor().shape()),
        lse_(DType::f32, {c.rows(), c.heads, layout.local_length()}),
        lo_(DType::i64, {c.rows(), layout.local_length()}),
        hi_(DType::i64, {c.rows(), layout.local_length()}) {
    for (const OwnedTensor* x : {&qkv_, &d_qkv_, &out_, &d_out_}) spoil(x->tensor());
    mask_.lo = lo_.tensor();
    mask_.hi = hi_.tensor();
    for (int64_t b = 0; b < c.rows(); ++b) {
      mask_.rows.emplace_back(c.documents[static_cast<size_t>(b)], c.rule);
      mask_.layouts.push_back(row_layout(layout, mask_.rows.back()));
      mask_.row_ids.push_back(1000 + b);
      deal_mask(mask_.layouts.back(), rank, mask_.rows.back(), row(mask_.lo, b), row(mask_.hi, b));
    }
  }

  Tensor query() const { return heads_of(qkv_, 0, case_.heads); }
  Tensor key() const { return heads_of(qkv_, case_.heads, case_.kv_heads); }
  Tensor value() const { return heads_of(qkv_, case_.heads + case_.kv_heads, case_.kv_heads); }
  Tensor d_query() const { return heads_of(d_qkv_, 0, case_.heads); }
  Tensor d_key() const { return heads_of(d_qkv_, case_.heads, case_.kv_heads); }
  Tensor d_value() const { return heads_of(d_qkv_, case_.heads + case_.kv_heads, case_.kv_heads); }

  void deal_inputs(const AttentionInputs& x) const {
    scatter(x.query, query());
    scatter(x.key, key());
    scatter(x.value, value());
    scatter(x.d_out, d_out_.tensor());
  }

  void forward(Device& device, Arena& arena, const ContextGroups& groups) const {
    const ProgramScope scope(arena, "forward");
    attention(groups).forward(device, arena, mask_, setup_.dropout, query(), key(), value(), out_.tensor(),
                              lse_.tensor());
  }
  void backward(Device& device, Arena& arena, const ContextGroups& groups) const {
    const ProgramScope scope(arena, "backward");
    attention(groups).backward(device, arena, mask_, setup_.dropout, query(), key(), value(), out_.tensor(),
                               lse_.tensor(), d_out_.tensor(), d_query(), d_key(), d_value());
  }

  // Writes this rank's real tokens to the whole rows; returns how many pad outputs are not what they must be.
  int64_t collect(AttentionValues& y) const {
    int64_t dirty = gather(out_.tensor(), y.out) + gather(d_query(), y.d_query) + gather(d_key(), y.d_key) +
                    gather(d_value(), y.d_value);
    for (int64_t b = 0; b < case_.rows(); ++b)
      for (int64_t head = 0; head < case_.heads; ++head)
        for (int64_t i = 0; i < layout_.local_length(); ++i) {
          const int64_t q = position(b, i);
          const float lse = get(lse_.tensor(), {b, head, i});
          if (q < case_.seq_length)
            y.lse[static_cast<size_t>((b * case_.heads + head) * case_.seq_length + q)] = lse;
          else
            dirty += lse != -std::numeric_limits<float>::infinity();
        }
    return dirty;
  }

 private:
  ContextAttention attention(const ContextGroups& groups) const {
    return ContextAttention(groups, layout_, shape(), setup_.comm_type, setup_.all_gather);
  }
  int64_t position(int64_t b, int64_t i) const { return mask_.layouts[static_cast<size_t>(b)].position(rank_, i); }
  Shape fused_shape() const {
    return {case_.rows(), layout_.local_length(), case_.heads + 2 * case_.kv_heads, case_.head_dim};
  }
  ContextAttentionShape shape() const {
    return {.heads = case_.heads, .kv_heads = case_.kv_heads, .head_dim = case_.head_dim, .scale = case_.scale_used()};
  }
  static Tensor heads_of(const OwnedTensor& x, int64_t first, int64_t count) {
    return x.tensor().slice(2, first, first + count);
  }
  std::span<int64_t> row(const Tensor& x, int64_t b) const {
    return {x.data<int64_t>() + b * layout_.local_length(), static_cast<size_t>(layout_.local_length())};
  }
  static void spoil(const Tensor& x) {
    const Tensor flat = x.reshape({x.numel()});
    for (int64_t i = 0; i < x.numel(); ++i) set(flat, {i}, std::numeric_limits<float>::quiet_NaN());
  }

  // body(index in the whole rows, or -1 for a pad; b, i, head, d) for every element of a local (B, s, heads, D).
  template <typename Body>
  void for_each_element(const Tensor& local, Body&& body) const {
    for (int64_t b = 0; b < local.dim(0); ++b)
      for (int64_t i = 0; i < local.dim(1); ++i) {
        const int64_t q = position(b, i);
        for (int64_t head = 0; head < local.dim(2); ++head)
          for (int64_t d = 0; d < local.dim(3); ++d)
            body(q < case_.seq_length
                     ? static_cast<int64_t>(at(b, q, head, d, case_.seq_length, local.dim(2), local.dim(3)))
                     : int64_t{-1},
                 b, i, head, d);
      }
  }
  void scatter(const std::vector<float>& whole, const Tensor& local) const {
    for_each_element(local, [&](int64_t index, int64_t b, int64_t i, int64_t head, int64_t d) {
      if (index >= 0) set(local, {b, i, head, d}, whole[static_cast<size_t>(index)]);
    });
  }
  int64_t gather(const Tensor& local, std::vector<double>& whole) const {
    int64_t dirty = 0;
    for_each_element(local, [&](int64_t index, int64_t b, int64_t i, int64_t head, int64_t d) {
      const float value = get(local, {b, i, head, d});
      if (index >= 0)
        whole[static_cast<size_t>(index)] = value;
      else
        dirty += value != 0;
    });
    return dirty;
  }

  const AttentionCase& case_;
  const RankSetup& setup_;
  const SequenceLayout& layout_;
  int rank_;
  OwnedTensor qkv_, d_qkv_, out_, d_out_, lse_, lo_, hi_;
  BatchMask mask_;
};

// The plan of one rank's forward and backward, made on a dry device that stands in for one of kind `of`; its
// communicator's traffic, too, when asked for.
inline MemoryPlan plan_rank(const AttentionCase& c, const RankSetup& setup, int rank, Traffic* forward = nullptr,
                            Traffic* backward = nullptr, DeviceKind of = test_device_kind()) {
  const SequenceLayout layout(setup.layout, c.seq_length, setup.cp);
  const LocalAttention local(c, setup, layout, rank);
  const RankGroups groups(c, setup, rank, [&](const std::vector<int>& ranks) {
    const auto place = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
    return make_dry_communicator(Dimension::cp, static_cast<int>(place), ranks);
  });
  Device device(DryRun{.of = of});
  Arena arena(device);
  local.forward(device, arena, groups.view());
  const Traffic moved_forward = groups.take_traffic();
  if (forward != nullptr) *forward = moved_forward;
  local.backward(device, arena, groups.view());
  if (backward != nullptr) *backward = groups.take_traffic();
  return arena.plan();
}

// The device of a rank, kept as long as the program runs: a GPU's takes longer to make than most cases.
inline Device& rank_device(int world_rank) {
  static std::mutex mutex;
  static auto* const devices = new std::map<int, std::unique_ptr<Device>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<Device>& device = (*devices)[world_rank];
  if (!device) device = std::make_unique<Device>(test_device_kind(), 1);
  return *device;
}

// Forward and backward on thread ranks, in memory planned beforehand, twice; traffic is that of one pass.
inline RankRun run_on_ranks(const AttentionCase& c, const AttentionInputs& inputs, const RankSetup& setup) {
  const SequenceLayout layout(setup.layout, c.seq_length, setup.cp);
  const auto cp = static_cast<size_t>(setup.cp);
  RankRun run;
  run.forward.resize(cp);
  run.backward.resize(cp);
  run.plans.resize(cp);
  constexpr double kUnwritten = std::numeric_limits<double>::quiet_NaN();
  run.values.out.assign(inputs.query.size(), kUnwritten);
  run.values.d_query.assign(inputs.query.size(), kUnwritten);
  run.values.d_key.assign(inputs.key.size(), kUnwritten);
  run.values.d_value.assign(inputs.key.size(), kUnwritten);
  run.values.lse.assign(static_cast<size_t>(c.rows() * c.heads * c.seq_length), kUnwritten);
  std::vector<int64_t> dirty(cp, 0);
  run_thread_ranks(setup.cp * setup.groups, 60, [&](int world_rank, World& world) {
    const int group_number = world_rank % setup.groups;
    const int rank = world_rank / setup.groups;
    const auto r = static_cast<size_t>(rank);
    Device& device = rank_device(world_rank);
    const RankGroups groups(c, setup, rank, [&](std::vector<int> ranks) {
      for (int& member : ranks) member = member * setup.groups + group_number;
      return world.group(world_rank, std::move(ranks), Dimension::cp, device);
    });

    const MemoryPlan plan = plan_rank(c, setup, rank);
    const LocalAttention local(c, setup, layout, rank);
    local.deal_inputs(inputs);
    Arena arena(device, plan);
    local.forward(device, arena, groups.view());
    const Traffic forward = groups.take_traffic();
    local.backward(device, arena, groups.view());
    const Traffic backward = groups.take_traffic();
    // Once more, in memory that the first pass left dirty: whatever should start from zero must be set to it.
    local.forward(device, arena, groups.view());
    local.backward(device, arena, groups.view());
    device.synchronize();
    if (group_number != setup.groups - 1) return;
    run.forward[r] = forward;
    run.backward[r] = backward;
    run.plans[r] = plan;
    dirty[r] = local.collect(run.values);
  });
  for (int64_t n : dirty) run.dirty_pads += n;
  return run;
}

// Largest difference over the largest wanted value; infinity for a NaN, or where only one of the two is infinite.
inline double relative_error(const std::vector<double>& got, const std::vector<double>& want) {
  EXPECT_EQ(got.size(), want.size());
  double signal = 0;
  double error = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (got[i] == want[i] && std::isinf(want[i])) continue;
    const double difference = std::abs(got[i] - want[i]);
    if (!std::isfinite(difference)) return std::numeric_limits<double>::infinity();
    error = std::max(error, difference);
    signal = std::max(signal, std::abs(want[i]));
  }
  return error == 0 ? 0 : error / signal;
}

struct ValueErrors {
  double out = 0, lse = 0, d_query = 0, d_key = 0, d_value = 0;
  double largest() const { return std::max({out, lse, d_query, d_key, d_value}); }
};

inline ValueErrors errors_of(const AttentionValues& got, const AttentionValues& want) {
  return {relative_error(got.out, want.out), relative_error(got.lse, want.lse),
          relative_error(got.d_query, want.d_query), relative_error(got.d_key, want.d_key),
          relative_error(got.d_value, want.d_value)};
}

inline void expect_close(const AttentionValues& got, const AttentionValues& want, double tolerance) {
  const ValueErrors errors = errors_of(got, want);
  EXPECT_LE(errors.out, tolerance) << "out";
  EXPECT_LE(errors.lse, tolerance) << "lse";
  EXPECT_LE(errors.d_query, tolerance) << "d_query";
  EXPECT_LE(errors.d_key, tolerance) << "d_key";
  EXPECT_LE(errors.d_value, tolerance) << "d_value";
}

}  // namespace farspan::test
