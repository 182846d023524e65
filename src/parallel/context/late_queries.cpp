// SPDX-License-Identifier: Apache-2.0
#include "parallel/context/late_queries.h"

#include <algorithm>
#include <span>

#include "ops/key_intervals.h"

namespace farspan {
namespace {

// What a GPU computes while a byte travels: 500 TFLOP/s of attention beside 300 GB/s, as measured between two H200s of
// one machine.
constexpr double kFlopsPerByte = 1700;

// What it costs to attend to queries twice, in parts of attending to them with this rank's keys. A model of tiles says
// 0.24 to 0.28 for documents of 8192 tokens on average over 8 ranks of 16384 (docs/performance.md); not measured apart.
constexpr double kCostOfTwice = 0.25;

const LocalSpan& owned_around(std::span<const LocalSpan> owned, const Span& positions) {
  return *std::find_if(owned.begin(), owned.end(),
                       [&](const LocalSpan& own) { return !intersect(own.positions, positions).empty(); });
}

bool within(const Span& inner, const Span& outer) { return inner.begin >= outer.begin && inner.end <= outer.end; }

}  // namespace

LateQueries::LateQueries(const AttentionCall& call, const KeySchedule& schedule) {
  if (!call.unites_blocks() || schedule.steps.size() != 1 || schedule.steps[0].whole) return;
  int64_t received = 0;
  size_t pieces = 0;
  for (const Parcel& parcel : schedule.steps[0].receives) {
    received += parcel.tokens;
    pieces += parcel.segments.size();
  }

  // Which see keys of other ranks, and what there is to do with this rank's keys: for them, and for the others.
  SpanSubset early(call.query_spans.size()), late(call.query_spans.size());
  int64_t early_pairs = 0, late_pairs = 0;
  bool bent = false;  // else one plain or causal block
  for (size_t row = 0; row < call.query_spans.size(); ++row) {
    const std::vector<QuerySpan>& spans = call.query_spans[row];
    const std::span<const LocalSpan> owned = call.rows.layouts[row].spans(call.rank());
    if (std::max(spans.size(), owned.size()) > static_cast<size_t>(kMostKeyPieces)) return;
    bent = bent || spans.size() > owned.size();
    for (const QuerySpan& span : spans) {
      // A block that leaves out some queries cannot tell them from others that see nothing at all.
      for (const VisibleRun& run : span.runs)
        if (run.lo_step == run.hi_step && run.hi <= run.lo) return;
      bent = bent || span.runs.size() > 1;
      const bool waits = !within(span.sees, owned_around(owned, span.queries.positions).positions);
      early[row].push_back(!waits);
      late[row].push_back(waits);
      for (const LocalSpan& own : owned)
        (waits ? late_pairs : early_pairs) += call.rows.masks[row].visible_pairs(span.queries.positions, own.positions);
    }
  }
  const auto flops = [&](int64_t pairs) {
    return 4.0 * static_cast<double>(pairs) * static_cast<double>(call.shape.heads * call.shape.head_dim);
  };
  const double bytes =
      2.0 * static_cast<double>(received * call.shape.kv_heads * call.shape.head_dim * size_of(call.dtype()));
  const double idle = kFlopsPerByte * bytes - flops(early_pairs);
  if (!bent || late_pairs == 0 || idle > kCostOfTwice * flops(late_pairs)) return;

  std::vector<Segment> own;
  for (size_t row = 0; row < late.size(); ++row)
    for (const LocalSpan& owned : call.rows.layouts[row].spans(call.rank())) {
      const size_t first = own.size();
      for (size_t i = 0; i < late[row].size(); ++i) {
        const Span seen = intersect(call.query_spans[row][i].sees, owned.positions);
        if (!late[row][i] || seen.empty()) continue;
        if (own.size() > first && seen.begin <= own.back().keys.positions.end)
          own.back().keys.positions.end = std::max(own.back().keys.positions.end, seen.end);
        else
          own.push_back({static_cast<int64_t>(row), {seen, owned.local_begin + seen.begin - owned.positions.begin}});
      }
    }
  int64_t own_tokens = 0;
  for (const Segment& segment : own) own_tokens += segment.tokens();
  const int64_t room = schedule.sizes.capacity / call.shape.kv_heads * schedule.sizes.buffers();
  if (received + own_tokens > room || pieces + own.size() > static_cast<size_t>(kMostKeyPieces)) return;
  early_ = std::move(early);
  late_ = std::move(late);
  own_keys_ = std::move(own);
}

}  // namespace farspan
