// SPDX-License-Identifier: Apache-2.0
#include "parallel/context/choose_cp_comm_type.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace farspan {
namespace {

// A type that is faster by less than the first is not worth more memory; one that holds less by less than the second is
// not worth more time.
constexpr double kWorthwhileSeconds = 0.01;
constexpr double kWorthwhileBytes = 0.1;

constexpr int64_t kGpusOfAHost = 8;

// One rank's share of a row, as keys travel: among `ranks` ranks with `tokens` each.
struct Share {
  double tokens;
  int ranks;
  ContextAttentionShape shape;
  double element;  // bytes
  double attention_forward;
  double attention_backward;

  double kv_width() const { return static_cast<double>(shape.kv_heads * shape.head_dim); }
  double query_width() const { return static_cast<double>(shape.heads * shape.head_dim); }
  // Keys, values and their gradients that the first rank of a causal zigzag receives: everybody's.
  double key_bytes() const { return (ranks - 1) * tokens * 2 * kv_width() * element; }
  double gradient_bytes() const { return (ranks - 1) * tokens * 2 * kv_width() * 4; }
};

Share share_of(const SequenceLayout& layout, const ContextAttentionShape& shape, DType dtype, const CpRates& rates) {
  const double row = static_cast<double>(layout.padded_length());
  const double pairs = rates.visible_share * row * row / layout.cp();
  const double forward = 4 * static_cast<double>(shape.heads * shape.head_dim) * pairs / rates.attention_flops;
  return {static_cast<double>(layout.local_length()), layout.cp(), shape,
          static_cast<double>(size_of(dtype)),        forward,     2.5 * forward};
}

// fp32 sums beside gradients of a shorter type.
double sum_bytes(const Share& share) {
  return share.element == 4 ? 0 : share.tokens * 4 * (share.query_width() + 2 * share.kv_width());
}

// Reading and writing keys once to pack them; gradients are zeroed, and added to their owner's.
double copy_seconds(const Share& share, const CpRates& rates) {
  return (2 * 2 * share.key_bytes() + 4 * share.gradient_bytes()) / rates.memory_bandwidth;
}

void add_travel(const Share& share, const ScheduleSizes& backward, double steps, const CpRates& rates, CpCost& cost) {
  const double keys = share.key_bytes() / rates.link_bandwidth;
  const double gradients = share.gradient_bytes() / rates.link_bandwidth;
  const double arrivals =
      backward.overlap || !backward.several
          ? exposed_arrivals(keys, share.attention_forward, share.ranks, steps) +
                exposed_arrivals(keys + gradients * (steps - 1) / steps, share.attention_backward, share.ranks, steps) +
                gradients / steps
          : 2 * keys + gradients;
  cost.received_bytes += 2 * share.key_bytes() + share.gradient_bytes();
  cost.exposed_seconds += arrivals + 3 * steps * rates.meeting_seconds + copy_seconds(share, rates);
}

CpCost p2p_cost(const Share& share, DType dtype, const CpRates& rates) {
  const ScheduleSizes sizes = p2p_sizes(static_cast<int64_t>(share.tokens), share.ranks, share.shape, rates.pieces);
  const double piece = static_cast<double>(sizes.capacity / sizes.heads);
  const double hops = share.ranks - 1;
  const double steps = piece >= share.tokens ? std::ceil(hops / std::floor(piece / share.tokens))
                                             : hops * std::ceil(share.tokens / piece);
  CpCost cost;
  cost.type = CpCommType::p2p;
  add_travel(share, sizes, steps, rates, cost);
  cost.working_bytes = static_cast<double>(buffer_bytes(sizes, share.shape, dtype, Pass::backward)) + sum_bytes(share);
  return cost;
}

CpCost all_gather_cost(const Share& share, DType dtype, const CpRates& rates) {
  const ScheduleSizes sizes =
      all_gather_sizes(static_cast<int64_t>(share.tokens), share.ranks, share.shape, dtype, Pass::backward, {});
  CpCost cost;
  cost.type = CpCommType::all_gather;
  const double steps = std::ceil(static_cast<double>(share.shape.kv_heads) / static_cast<double>(sizes.heads));
  add_travel(share, sizes, steps, rates, cost);
  cost.working_bytes = static_cast<double>(buffer_bytes(sizes, share.shape, dtype, Pass::backward)) + sum_bytes(share);
  return cost;
}

// Heads traded among `n` of the ranks; what is left to travel is the caller's to add.
CpCost trade_cost(const Share& share, int n, const CpRates& rates) {
  const double heads = static_cast<double>(share.shape.heads) / n;
  const double kv_heads = static_cast<double>(std::max<int64_t>(1, share.shape.kv_heads / n));
  const double D = static_cast<double>(share.shape.head_dim);
  const double wire = n > share.shape.kv_heads ? 4 : share.element;
  // Per token of the n ranks together: query, key, value; in backward d_out, and the gradients, too.
  const double forward = (2 * heads + 2 * kv_heads) * D * share.element + 4 * heads;
  const double backward = (3 * heads + 2 * kv_heads) * D * share.element + 8 * heads + 2 * kv_heads * D * wire;
  const double traded_tokens = n * share.tokens;
  CpCost cost;
  cost.received_bytes = (n - 1) * share.tokens * (forward + backward);
  // Packed, put in row order, and back: each byte is read and written twice.
  cost.exposed_seconds = cost.received_bytes / rates.link_bandwidth + 6 * rates.meeting_seconds +
                         4 * traded_tokens * (forward + backward) / rates.memory_bandwidth;
  const double inputs = (2 * heads + 2 * kv_heads) * D * share.element;
  const double gradients = 4 * (heads + 2 * kv_heads) * D;
  cost.working_bytes = traded_tokens * std::max(2 * inputs, inputs + 8 * heads + 16 + gradients);
  return cost;
}

CpCost refused(CpCommType type, std::string reason) {
  CpCost cost;
  cost.type = type;
  cost.refused = std::move(reason);
  return cost;
}

CpCost a2a_cost(const Share& share, const CpRates& rates) {
  if (auto reason = refuse_a2a(share.shape.heads, share.shape.kv_heads, share.ranks))
    return refused(CpCommType::a2a, *reason);
  CpCost cost = trade_cost(share, share.ranks, rates);
  cost.type = CpCommType::a2a;
  return cost;
}

CpCost a2a_p2p_cost(const Share& share, DType dtype, HierarchicalSizes sizes, const CpRates& rates) {
  if (sizes.inner == 1 || sizes.outer == 1)
    return refused(CpCommType::a2a_p2p, fmt::format("{} * {} ranks are one level", sizes.inner, sizes.outer));
  if (auto reason = refuse_a2a(share.shape.heads, share.shape.kv_heads, sizes.inner))
    return refused(CpCommType::a2a_p2p, *reason);
  CpCost cost = trade_cost(share, sizes.inner, rates);
  Share traded = share;
  traded.tokens *= sizes.inner;
  traded.ranks = sizes.outer;
  traded.shape.heads /= sizes.inner;
  traded.shape.kv_heads = std::max<int64_t>(1, traded.shape.kv_heads / sizes.inner);
  const CpCost travel = p2p_cost(traded, dtype, rates);
  cost.type = CpCommType::a2a_p2p;
  cost.received_bytes += travel.received_bytes;
  cost.exposed_seconds += travel.exposed_seconds;
  cost.working_bytes += travel.working_bytes - sum_bytes(traded);  // those sums are in the trade's bytes already
  return cost;
}

}  // namespace

CpRates cp_rates(DeviceKind device, DType dtype, int64_t ranks) {
  if (device == DeviceKind::cpu) return {};
  return {.pieces = kPiecesOnGpu,
          .attention_flops = dtype == DType::f32 ? 20e12 : 535e12,
          .link_bandwidth = ranks <= kGpusOfAHost ? 300e9 : 50e9,
          .memory_bandwidth = 4270e9,
          .meeting_seconds = 20e-6};
}

double exposed_arrivals(double transfer, double attention, int ranks, double steps) {
  const double own = attention / ranks;
  const double each = (attention - own) / steps;
  return std::max(0.0, transfer / steps - own) + (steps - 1) * std::max(0.0, transfer / steps - each);
}

std::array<CpCost, 4> cp_costs(const SequenceLayout& layout, const ContextAttentionShape& shape, DType dtype,
                               HierarchicalSizes sizes, const CpRates& rates) {
  const Share share = share_of(layout, shape, dtype, rates);
  std::array<CpCost, 4> costs{p2p_cost(share, dtype, rates), all_gather_cost(share, dtype, rates),
                              a2a_cost(share, rates), a2a_p2p_cost(share, dtype, sizes, rates)};
  for (CpCost& cost : costs)
    if (!cost.refused) cost.attention_seconds = share.attention_forward + share.attention_backward;
  return costs;
}

CpCommType choose_cp_comm_type(CpCommType asked, const SequenceLayout& layout, const ContextAttentionShape& shape,
                               DType dtype, std::span<const int64_t> hierarchical, const CpRates& rates) {
  if (asked != CpCommType::automatic) return asked;
  if (layout.cp() == 1) return CpCommType::p2p;
  const HierarchicalSizes sizes = hierarchical_sizes(hierarchical, layout.cp(), shape.heads, shape.kv_heads);
  const std::array<CpCost, 4> costs = cp_costs(layout, shape, dtype, sizes, rates);
  constexpr double kMost = std::numeric_limits<double>::infinity();
  double least_seconds = kMost;
  for (const CpCost& cost : costs)
    if (!cost.refused) least_seconds = std::min(least_seconds, cost.seconds());
  const auto fast = [&](const CpCost& cost) {
    return !cost.refused && cost.seconds() <= (1 + kWorthwhileSeconds) * least_seconds;
  };
  double least_bytes = kMost;
  for (const CpCost& cost : costs)
    if (fast(cost)) least_bytes = std::min(least_bytes, cost.working_bytes);
  const CpCost* chosen = nullptr;
  for (const CpCost& cost : costs) {
    if (!fast(cost) || cost.working_bytes > (1 + kWorthwhileBytes) * least_bytes) continue;
    if (chosen == nullptr || cost.seconds() < chosen->seconds()) chosen = &cost;
  }
  return chosen->type;
}

}  // namespace farspan
