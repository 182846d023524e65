// SPDX-License-Identifier: Apache-2.0
#include "ops/ref/attention_ref.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "device/parallel_for.h"
#include "ops/dropout_rule.h"

namespace farspan::ref {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// Keys [begin, end) of the block that one query sees.
struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// A block with typed pointers. T is the type of query, key, value and d_out.
template <typename T>
struct TypedBlock {
  explicit TypedBlock(const AttentionBlock& b)
      : block(b),
        query(b.query.data<T>()),
        key(b.key.data<T>()),
        value(b.value.data<T>()),
        lo(b.lo.data<int64_t>()),
        hi(b.hi.data<int64_t>()),
        queries(b.query.dim(0)),
        keys(b.key.dim(0)),
        heads(b.query.dim(1)),
        kv_heads(b.key.dim(1)),
        head_size(b.query.dim(2)),
        group(heads / kv_heads),
        drop(b.dropout.probability) {
    for (int64_t a = 0; a < heads; ++a) draw_keys.push_back(attention_draw_key(b.dropout, a));
  }

  const T* query_row(int64_t i, int64_t a) const {
    return query + i * block.query.stride(0) + a * block.query.stride(1);
  }
  const T* key_row(int64_t j, int64_t h) const { return key + j * block.key.stride(0) + h * block.key.stride(1); }
  const T* value_row(int64_t j, int64_t h) const {
    return value + j * block.value.stride(0) + h * block.value.stride(1);
  }

  KeyRange visible(int64_t i) const {
    const int64_t begin = std::max<int64_t>(lo[i * block.lo.stride(0)], block.key_begin) - block.key_begin;
    const int64_t end = std::min<int64_t>(hi[i * block.hi.stride(0)], block.key_begin + keys) - block.key_begin;
    return {begin, std::max(begin, end)};
  }
  bool sees(int64_t i, int64_t j) const {
    const KeyRange range = visible(i);
    return range.begin <= j && j < range.end;
  }
  double score(int64_t i, int64_t a, int64_t j) const {
    return static_cast<double>(block.scale) * dot(query_row(i, a), key_row(j, a / group));
  }
  // What dropout multiplies a probability by: 0 or the inverse of the share kept.
  double kept(int64_t i, int64_t a, int64_t j) const {
    if (block.dropout.probability == 0) return 1;
    const Philox draws(draw_keys[static_cast<size_t>(a)], static_cast<uint64_t>(block.query_begin + i));
    const int64_t position = block.key_begin + j;
    const Philox::Block words = draws.block(static_cast<uint64_t>(position / 4));
    return drop.drops(words[static_cast<size_t>(position % 4)]) ? 0 : 1 / (1 - block.dropout.probability);
  }
  double dot(const T* x, const T* y) const {
    double sum = 0;
    for (int64_t d = 0; d < head_size; ++d) sum += static_cast<double>(to_float(x[d])) * to_float(y[d]);
    return sum;
  }

  const AttentionBlock& block;
  const T* query;
  const T* key;
  const T* value;
  const int64_t* lo;
  const int64_t* hi;
  int64_t queries, keys, heads, kv_heads, head_size, group;
  DropoutRule drop;
  std::vector<uint64_t> draw_keys;  // one a query head
};

// y += weight * x
template <typename T>
void add_scaled(double weight, const T* x, std::vector<double>& y) {
  for (size_t d = 0; d < y.size(); ++d) y[d] += weight * to_float(x[d]);
}

void add_to(float* destination, const std::vector<double>& sum) {
  for (size_t d = 0; d < sum.size(); ++d) destination[d] = static_cast<float>(destination[d] + sum[d]);
}

// One query of one head: out_row (D) and its log-sum-exp take in the block's visible keys.
template <typename T>
void forward_row(const TypedBlock<T>& b, int64_t i, int64_t a, float* out_row, float* lse) {
  const KeyRange range = b.visible(i);
  if (range.begin == range.end) return;
  std::vector<double> scores(static_cast<size_t>(range.end - range.begin));
  const double before = *lse;
  double highest = before;
  for (int64_t j = range.begin; j < range.end; ++j) {
    const double s = b.score(i, a, j);
    scores[static_cast<size_t>(j - range.begin)] = s;
    if (!(s <= highest)) highest = s;  // a NaN score is kept, so that it reaches the output
  }
  if (highest == kMinusInfinity) return;  // nothing seen so far carries weight

  const double old_weight = std::exp(before - highest);
  double sum = old_weight;
  std::vector<double> mean(static_cast<size_t>(b.head_size), 0.0);
  if (before != kMinusInfinity) add_scaled(old_weight, out_row, mean);
  for (int64_t j = range.begin; j < range.end; ++j) {
    const double weight = std::exp(scores[static_cast<size_t>(j - range.begin)] - highest);
    sum += weight;
    add_scaled(b.kept(i, a, j) * weight, b.value_row(j, a / b.group), mean);
  }
  for (size_t d = 0; d < mean.size(); ++d) out_row[d] = static_cast<float>(mean[d] / sum);
  *lse = static_cast<float>(highest + std::log(sum));
}

template <typename T>
void forward(const Device& device, const AttentionBlock& block, const Tensor& out, const Tensor& lse) {
  const TypedBlock<T> b(block);
  float* const out_data = out.data<float>();
  float* const lse_data = lse.data<float>();
  parallel_tasks(device.threads(), b.queries, [&](int64_t i, int) {
    for (int64_t a = 0; a < b.heads; ++a)
      forward_row(b, i, a, out_data + i * out.stride(0) + a * out.stride(1), lse_data + a * lse.stride(0) + i);
  });
}

// What backward knows besides the block: d_out, and per (head, query) the final lse and delta.
template <typename T>
struct OutputGradient {
  OutputGradient(const Tensor& d_out_, const Tensor& lse_, const Tensor& delta_)
      : d_out(d_out_), lse(lse_), delta(delta_) {}

  const T* row(int64_t i, int64_t a) const { return d_out.data<T>() + i * d_out.stride(0) + a * d_out.stride(1); }

  // p_ij of the score s_ij; a query whose keys all had weight zero passes nothing back.
  double probability(int64_t i, int64_t a, double s) const {
    const double l = lse.data<float>()[a * lse.stride(0) + i];
    return l == kMinusInfinity ? 0 : std::exp(s - l);
  }
  double delta_at(int64_t i, int64_t a) const { return delta.data<float>()[a * delta.stride(0) + i]; }

  const Tensor& d_out;
  const Tensor& lse;
  const Tensor& delta;
};

// ds_ij = p_ij (m_ij <d_out_i, v_j> - delta_i)
template <typename T>
double d_score(const TypedBlock<T>& b, const OutputGradient<T>& g, double p, int64_t i, int64_t a, int64_t j) {
  return p * (b.kept(i, a, j) * b.dot(g.row(i, a), b.value_row(j, a / b.group)) - g.delta_at(i, a));
}

template <typename T>
void backward_query(const TypedBlock<T>& b, const OutputGradient<T>& g, int64_t i, int64_t a, float* d_query_row) {
  const KeyRange range = b.visible(i);
  if (range.begin == range.end) return;
  std::vector<double> sum(static_cast<size_t>(b.head_size), 0.0);
  for (int64_t j = range.begin; j < range.end; ++j) {
    const double p = g.probability(i, a, b.score(i, a, j));
    add_scaled(b.block.scale * d_score(b, g, p, i, a, j), b.key_row(j, a / b.group), sum);
  }
  add_to(d_query_row, sum);
}

template <typename T>
void backward_key(const TypedBlock<T>& b, const OutputGradient<T>& g, int64_t j, int64_t h, float* d_key_row,
                  float* d_value_row) {
  std::vector<double> d_key(static_cast<size_t>(b.head_size), 0.0);
  std::vector<double> d_value(static_cast<size_t>(b.head_size), 0.0);
  for (int64_t i = 0; i < b.queries; ++i) {
    if (!b.sees(i, j)) continue;
    for (int64_t a = h * b.group; a < (h + 1) * b.group; ++a) {
      const double p = g.probability(i, a, b.score(i, a, j));
      add_scaled(b.kept(i, a, j) * p, g.row(i, a), d_value);
      add_scaled(b.block.scale * d_score(b, g, p, i, a, j), b.query_row(i, a), d_key);
    }
  }
  add_to(d_key_row, d_key);
  add_to(d_value_row, d_value);
}

template <typename T>
void backward(const Device& device, const AttentionBlock& block, const Tensor& d_out, const Tensor& lse,
              const Tensor& delta, const Tensor& d_query, const Tensor& d_key, const Tensor& d_value) {
  const TypedBlock<T> b(block);
  const OutputGradient<T> g(d_out, lse, delta);
  float* const dq = d_query.data<float>();
  float* const dk = d_key.data<float>();
  float* const dv = d_value.data<float>();
  parallel_tasks(device.threads(), b.queries, [&](int64_t i, int) {
    for (int64_t a = 0; a < b.heads; ++a)
      backward_query(b, g, i, a, dq + i * d_query.stride(0) + a * d_query.stride(1));
  });
  parallel_tasks(device.threads(), b.keys, [&](int64_t j, int) {
    for (int64_t h = 0; h < b.kv_heads; ++h)
      backward_key(b, g, j, h, dk + j * d_key.stride(0) + h * d_key.stride(1),
                   dv + j * d_value.stride(0) + h * d_value.stride(1));
  });
}

}  // namespace

void attention_forward(const Device& device, const AttentionBlock& block, const Tensor& out, const Tensor& lse) {
  const auto body = block.query.dtype() == DType::f32 ? forward<float> : forward<BFloat16>;
  body(device, block, out, lse);
}

void attention_backward(const Device& device, const AttentionBlock& block, const Tensor& d_out, const Tensor& lse,
                        const Tensor& delta, const Tensor& d_query, const Tensor& d_key, const Tensor& d_value) {
  const auto body = block.query.dtype() == DType::f32 ? backward<float> : backward<BFloat16>;
  body(device, block, d_out, lse, delta, d_query, d_key, d_value);
}

}  // namespace farspan::ref
