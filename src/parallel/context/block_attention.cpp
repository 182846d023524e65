// SPDX-License-Identifier: Apache-2.0
#include "parallel/context/block_attention.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "ops/attention.h"
#include "ops/elementwise.h"
#include "ops/key_intervals.h"

namespace farspan {
namespace {

// The query heads that read key/value heads `heads`.
Span query_heads(const ContextAttentionShape& shape, Span heads) {
  const int64_t group = shape.heads / shape.kv_heads;
  return {heads.begin * group, heads.end * group};
}

// What one block touches of tensors that have a query in each entry: local tokens [begin, end) of a row, some heads.
struct QueryPart {
  int64_t row;
  Span tokens;
  Span heads;
  Tensor of_tokens(const Tensor& x) const { return entry(x, row).slice(0, tokens.begin, tokens.end); }
  Tensor of_heads(const Tensor& x) const {  // (B, s, A, D) -> (n, a, D)
    return of_tokens(x).slice(1, heads.begin, heads.end);
  }
  Tensor of_scalars(const Tensor& x) const {  // (B, A, s) -> (a, n)
    return entry(x, row).slice(1, tokens.begin, tokens.end).slice(0, heads.begin, heads.end);
  }
};

// Query spans [first_span, last_span) of a row and segments [first_segment, last_segment) of a key block.
struct Rectangle {
  size_t first_span = 0;
  size_t last_span = 0;
  size_t first_segment = 0;
  size_t last_segment = 0;
  int64_t pairs = 0;
  // All of a row's spans and segments that have to do with each other: queries' intervals are counted in its keys.
  bool united = false;
  bool causal = false;  // united, and query i sees keys 0 to i
};

// One block: its queries, its keys as tokens of the key block, and its runs.
struct BlockPart {
  QueryPart queries;
  Span keys;
  std::vector<VisibleRun> runs;
  AttentionBlock block;
  bool is_first = false;  // no block has met these queries before
};

// Which rectangles of a row's queries and of some of its keys are attended to, in which order. Joined or not, no two
// share a pair and none with a visible pair is left out.
class Rectangles {
 public:
  Rectangles(const AttentionCall& call, const MetQueries& met, const KeyBlock& keys, const SpanSubset& queries)
      : call_(call), met_(met), keys_(keys), row_(keys.segments[0].row) {
    if (!queries.empty()) chosen_ = &queries[static_cast<size_t>(row_)];
    if (call.joins_blocks())
      join();
    else
      separate();
    if (!call.unites_blocks() || list_.size() <= 1) return;
    const bool causal = is_causal();
    const auto is_simple = [&](const Rectangle& r) { return all_visible(r) || ends_causally(r); };
    if (causal || chosen_ != nullptr || !std::all_of(list_.begin(), list_.end(), is_simple)) unite(causal);
  }
  const std::vector<Rectangle>& list() const { return list_; }
  bool chosen(size_t span) const { return chosen_ == nullptr || (*chosen_)[span]; }
  // Whether others of the row's queries, which see nothing of these blocks, have results of their own.
  bool leaves_some() const { return chosen_ != nullptr; }

 private:
  const std::vector<QuerySpan>& spans() const { return call_.query_spans[static_cast<size_t>(row_)]; }
  const IntervalMask& mask() const { return call_.rows.masks[static_cast<size_t>(row_)]; }
  Span positions(size_t segment) const { return keys_.segments[segment].keys.positions; }

  int64_t pairs(size_t span, size_t segment) const {
    if (!chosen(span)) return 0;
    return mask().visible_pairs(spans()[span].queries.positions, positions(segment));
  }
  bool plain(size_t span, size_t segment) const {
    return pairs(span, segment) == spans()[span].queries.positions.length() * positions(segment).length();
  }

  // Segment by segment, queries ascending, so that sums have one order.
  void separate() {
    for (size_t segment = 0; segment < keys_.segments.size(); ++segment) {
      auto span = std::partition_point(spans().begin(), spans().end(),
                                       [&](const QuerySpan& s) { return s.sees.end <= positions(segment).begin; });
      for (; span != spans().end() && span->sees.begin < positions(segment).end; ++span) {
        const auto i = static_cast<size_t>(span - spans().begin());
        if (pairs(i, segment) > 0) list_.push_back({i, i + 1, segment, segment + 1, pairs(i, segment)});
      }
    }
  }

  // Segments that a span sees all of become one rectangle, with the next one that it sees in part. Their keys may then
  // be taken to stand right before that one's: no query of the span can tell. Rectangles of neighbouring spans that see
  // all of the same segments become one. The last queries come first: they see most keys, so that most gradients of
  // keys begin with their block.
  void join() {
    for (size_t span = spans().size(); span-- > 0;)
      for (size_t segment = 0; segment < keys_.segments.size();) {
        Rectangle rectangle{span, span + 1, segment, segment + 1, pairs(span, segment)};
        if (rectangle.pairs == 0) {
          ++segment;
          continue;
        }
        if (plain(span, segment)) {
          extend(rectangle);
          if (!list_.empty() && continues(list_.back(), rectangle)) {
            list_.back().first_span = span;
            list_.back().pairs += rectangle.pairs;
            segment = rectangle.last_segment;
            continue;
          }
        }
        list_.push_back(rectangle);
        segment = rectangle.last_segment;
      }
  }

  void extend(Rectangle& r) const {
    const Span queries = spans()[r.first_span].queries.positions;
    while (r.last_segment < keys_.segments.size()) {
      const int64_t more = pairs(r.first_span, r.last_segment);
      // What lies between two segments must be visible too.
      if (more == 0 || mask().visible(queries.begin).end < positions(r.last_segment).begin) return;
      const bool whole = plain(r.first_span, r.last_segment);
      r.pairs += more;
      ++r.last_segment;
      if (!whole) return;
    }
  }

  bool all_visible(const Rectangle& r) const {
    for (size_t segment = r.first_segment; segment < r.last_segment; ++segment)
      if (!plain(r.first_span, segment)) return false;
    return true;
  }

  // Whether the queries of `r`, one span, are its last keys too and each sees all keys up to itself.
  bool ends_causally(const Rectangle& r) const {
    return r.last_span == r.first_span + 1 && sees_up_to_itself(r.first_span, r.last_segment - 1, r.first_segment);
  }

  // Whether `segment` is the span's own tokens and each of these sees all keys from segment `first` up to itself.
  bool sees_up_to_itself(size_t span, size_t segment, size_t first) const {
    const auto& [queries, sees, runs] = spans()[span];
    return queries.positions == positions(segment) && runs.size() == 1 && runs[0].lo_step == 0 &&
           runs[0].lo <= positions(first).begin && runs[0].hi_step == 1 && runs[0].hi == queries.positions.begin + 1;
  }

  // Whether the keys are those of the queries' own tokens, and each query sees all of them up to itself: wherever the
  // tokens stand in the row, together they are one causal block.
  bool is_causal() const {
    if (chosen_ != nullptr || spans().size() != keys_.segments.size()) return false;
    for (size_t i = 0; i < spans().size(); ++i)
      if (!sees_up_to_itself(i, i, 0) || (i > 0 && !follows(i))) return false;
    return true;
  }

  // Whether the span's queries lie right behind those of the span before.
  bool follows(size_t span) const {
    const LocalSpan& before = spans()[span - 1].queries;
    return before.local_begin + before.positions.length() == spans()[span].queries.local_begin;
  }

  // Makes one rectangle of all where none of the queries has been met, or each has. Those between that are not chosen
  // see nothing in it.
  void unite(bool causal) {
    Rectangle whole = list_[0];
    whole.pairs = 0;
    whole.united = true;
    whole.causal = causal;
    for (const Rectangle& r : list_) {
      whole.first_span = std::min(whole.first_span, r.first_span);
      whole.last_span = std::max(whole.last_span, r.last_span);
      whole.first_segment = std::min(whole.first_segment, r.first_segment);
      whole.last_segment = std::max(whole.last_segment, r.last_segment);
      whole.pairs += r.pairs;
    }
    if (std::cmp_greater(whole.last_segment - whole.first_segment, kMostKeyPieces)) return;
    if (std::cmp_greater(whole.last_span - whole.first_span, kMostKeyPieces)) return;
    for (size_t span = whole.first_span; span < whole.last_span; ++span)
      if (chosen(span) && met_.is_new(row_, span, keys_.heads) != met_.is_new(row_, whole.first_span, keys_.heads))
        return;
    list_ = {whole};
  }

  // Whether `upper`, of the span before those of `lower`, sees the same keys, all of them, and is as new.
  bool continues(const Rectangle& lower, const Rectangle& upper) const {
    return lower.first_span == upper.last_span && lower.first_segment == upper.first_segment &&
           lower.last_segment == upper.last_segment && all_visible(lower) && all_visible(upper) &&
           follows(lower.first_span) &&
           met_.is_new(row_, lower.first_span, keys_.heads) == met_.is_new(row_, upper.first_span, keys_.heads);
  }

  const AttentionCall& call_;
  const MetQueries& met_;
  const KeyBlock& keys_;
  int64_t row_;
  const std::vector<bool>* chosen_ = nullptr;  // among the row's spans; null: all
  std::vector<Rectangle> list_;
};

// Tokens of a key block that its segments [first, last) have.
Span tokens_of_segments(const KeyBlock& keys, size_t first, size_t last) {
  Span tokens;
  for (size_t segment = 0; segment < last; ++segment) {
    tokens.end += keys.segments[segment].tokens();
    if (segment < first) tokens.begin = tokens.end;
  }
  return tokens;
}

BlockPart part_of(const AttentionCall& call, const KeyBlock& keys, const Rectangles& rectangles, const Rectangle& r) {
  const int64_t row = keys.segments[0].row;
  const std::vector<QuerySpan>& spans = call.query_spans[static_cast<size_t>(row)];
  const LocalSpan& first = spans[r.first_span].queries;
  const LocalSpan& last = spans[r.last_span - 1].queries;
  BlockPart part;
  part.queries = {
      row, {first.local_begin, last.local_begin + last.positions.length()}, query_heads(call.shape, keys.heads)};
  part.keys = tokens_of_segments(keys, r.first_segment, r.last_segment);
  for (size_t span = r.first_span; span < r.last_span && !r.united; ++span)
    for (VisibleRun run : spans[span].runs) {
      run.first += spans[span].queries.local_begin - first.local_begin;
      part.runs.push_back(run);
    }
  if (r.causal) part.runs.push_back({.count = part.queries.tokens.length(), .hi = 1, .hi_step = 1});
  AttentionBlock& block = part.block;
  block.query = part.queries.of_heads(call.query);
  block.key = keys.key.slice(0, part.keys.begin, part.keys.end);
  block.value = keys.value.slice(0, part.keys.begin, part.keys.end);
  block.lo = part.queries.of_tokens(call.lo);
  block.hi = part.queries.of_tokens(call.hi);
  block.key_begin = keys.segments[r.last_segment - 1].keys.positions.end - part.keys.length();
  block.query_begin = first.positions.begin;
  block.scale = call.shape.scale;
  block.visible_pairs = r.pairs;
  block.keeps_blind = rectangles.leaves_some();
  if (r.united) {
    std::vector<KeyPiece> pieces;
    for (size_t segment = r.first_segment; segment < r.last_segment; ++segment)
      pieces.push_back({keys.segments[segment].keys.positions.begin, keys.segments[segment].tokens()});
    const int64_t queries = part.queries.tokens.length();
    const Tensor key_lo = call.key_lo.tensor().slice(0, 0, queries);
    const Tensor key_hi = call.key_hi.tensor().slice(0, 0, queries);
    std::vector<QueryRange> ranges;
    for (size_t span = r.first_span; span < r.last_span; ++span) {
      if (!rectangles.chosen(span)) continue;
      const int64_t begin = spans[span].queries.local_begin - first.local_begin;
      const int64_t end = begin + spans[span].queries.positions.length();
      if (!ranges.empty() && ranges.back().end == begin)
        ranges.back().end = end;
      else
        ranges.push_back({begin, end});
    }
    key_intervals(call.device, pieces, ranges, block.lo, block.hi, key_lo, key_hi);
    block.lo = key_lo;
    block.hi = key_hi;
    block.key_begin = 0;
  }
  if (call.dropout.probability > 0) {
    block.dropout = call.dropout;
    block.dropout.row = call.row_ids[static_cast<size_t>(row)];
    block.dropout.first_head = call.shape.first_head + part.queries.heads.begin;
  }
  return part;
}

// Calls body(part, rectangle) for every block of these keys with a visible pair.
template <typename Body>
void for_each_block(const AttentionCall& call, MetQueries& met, const KeyBlock& keys, const SpanSubset& queries,
                    Body&& body) {
  const Rectangles rectangles(call, met, keys, queries);
  for (const Rectangle& r : rectangles.list()) {
    BlockPart part = part_of(call, keys, rectangles, r);
    part.block.runs = part.runs;
    for (size_t span = r.first_span; span < r.last_span; ++span)
      if (rectangles.chosen(span)) part.is_first = met.meet(keys.segments[0].row, span, keys.heads);
    body(part, r);
  }
}

// Calls body(keys, row, local tokens) for this rank's own keys of each row.
template <typename Body>
void for_each_own_row(const AttentionCall& call, Body&& body) {
  for (int64_t row = 0; row < call.rows.count(); ++row) {
    std::vector<Segment> segments;
    for (const LocalSpan& span : call.rows.layouts[static_cast<size_t>(row)].spans(call.rank()))
      segments.push_back({row, span});
    if (segments.empty()) continue;
    body(KeyBlock{segments, {0, call.shape.kv_heads}, entry(call.key, row), entry(call.value, row)}, row);
  }
}

// Which segments of a key block have gradients already; those that have none when it is over are zero.
class KeyGradients {
 public:
  KeyGradients(const AttentionCall& call, const KeyBlock& keys, const Tensor& d_key, const Tensor& d_value)
      : call_(call), keys_(keys), d_key_(d_key), d_value_(d_value), written_(keys.segments.size()) {}

  // How the next block uses the gradients of its segments.
  Accumulate begin(const Rectangle& r) {
    const auto first = written_.begin() + static_cast<std::ptrdiff_t>(r.first_segment);
    const auto last = written_.begin() + static_cast<std::ptrdiff_t>(r.last_segment);
    if (std::find(first, last, true) == last) {
      std::fill(first, last, true);
      return Accumulate::no;
    }
    zero(r.first_segment, r.last_segment);
    return Accumulate::yes;
  }
  void finish() { zero(0, written_.size()); }

 private:
  void zero(size_t first, size_t last) {
    for (size_t segment = first; segment < last; ++segment) {
      if (written_[segment]) continue;
      written_[segment] = true;
      const Span tokens = tokens_of_segments(keys_, segment, segment + 1);
      for (const Tensor& x : {d_key_, d_value_}) fill(call_.device, x.slice(0, tokens.begin, tokens.end), 0);
    }
  }

  const AttentionCall& call_;
  const KeyBlock& keys_;
  Tensor d_key_, d_value_;
  std::vector<bool> written_;
};

}  // namespace

namespace {

// The first position of `span` of which `holds` is false; it holds of those before and of none behind.
template <typename Holds>
int64_t first_without(Span span, Holds&& holds) {
  while (!span.empty()) {
    const int64_t middle = span.begin + span.length() / 2;
    if (holds(middle))
      span.begin = middle + 1;
    else
      span.end = middle;
  }
  return span.end;
}

// A span of a rank's tokens, cut where its queries cease to see keys before it and where they begin to see keys behind.
// What the span begins and ends with that sees nothing is cut off.
std::vector<LocalSpan> parts_by_sight(const IntervalMask& mask, const LocalSpan& span) {
  const Span whole = span.positions;
  Span all = whole;
  all.begin = first_without(all, [&](int64_t query) { return mask.visible_range({all.begin, query + 1}).empty(); });
  all.end = first_without(all, [&](int64_t query) { return !mask.visible_range({query, all.end}).empty(); });
  const int64_t from = first_without(all, [&](int64_t query) {
    return mask.visible_range({query, all.end}).begin < whole.begin;
  });
  const int64_t until = first_without(all, [&](int64_t query) {
    return mask.visible_range({all.begin, query + 1}).end <= whole.end;
  });
  std::vector<LocalSpan> parts;
  int64_t begin = whole.begin;
  for (int64_t end : {all.begin, std::min(from, until), std::max(from, until), all.end, whole.end}) {
    if (begin < end) parts.push_back({{begin, end}, span.local_begin + begin - whole.begin});
    begin = std::max(begin, end);
  }
  return parts;
}

// Whether a rank's part of a row holds the border of a document, or another bend of the mask: more than one run a span.
bool is_bent(const IntervalMask& mask, std::span<const LocalSpan> spans) {
  return std::any_of(spans.begin(), spans.end(),
                     [&](const LocalSpan& span) { return mask.visible_runs(span.positions).size() > 1; });
}

}  // namespace

void AttentionCall::prepare(Pass pass) {
  if (joins_blocks() && ranks() > 1) {
    key_lo = arena.take("attention.key_lo", DType::i64, {local_length()}, Purpose::workspace);
    key_hi = arena.take("attention.key_hi", DType::i64, {local_length()}, Purpose::workspace);
  }
  query_spans.assign(static_cast<size_t>(rows.count()), {});
  blind_spans.assign(query_spans.size(), {});
  for (size_t row = 0; row < query_spans.size(); ++row) {
    const IntervalMask& mask = rows.masks[row];
    const std::span<const LocalSpan> owned = rows.layouts[row].spans(rank());
    const bool cut = unites_blocks() && pass == Pass::forward && is_bent(mask, owned);
    std::vector<LocalSpan> parts;
    for (const LocalSpan& span : owned) {
      const std::vector<LocalSpan> of_span = cut ? parts_by_sight(mask, span) : std::vector{span};
      parts.insert(parts.end(), of_span.begin(), of_span.end());
    }
    for (const LocalSpan& part : parts) {
      const Span sees = mask.visible_range(part.positions);
      if (sees.empty()) {
        blind_spans[row].push_back(part);
        continue;
      }
      query_spans[row].push_back({part, sees, {}});
      if (device.targets_cuda()) query_spans[row].back().runs = mask.visible_runs(part.positions);
    }
  }
}

MetQueries::MetQueries(const AttentionCall& call) : heads_(static_cast<size_t>(call.shape.kv_heads)) {
  for (const std::vector<QuerySpan>& spans : call.query_spans) met_.emplace_back(spans.size() * heads_);
}

bool MetQueries::is_new(int64_t row, size_t span, Span key_value_heads) const {
  return !met_[static_cast<size_t>(row)][index(span, key_value_heads)];
}

bool MetQueries::meet(int64_t row, size_t span, Span key_value_heads) {
  const bool is_first = is_new(row, span, key_value_heads);
  std::vector<bool>& met = met_[static_cast<size_t>(row)];
  std::fill_n(met.begin() + static_cast<std::ptrdiff_t>(index(span, key_value_heads)), key_value_heads.length(), true);
  return is_first;
}

namespace {

// Calls body(part) for the queries that see nothing, all their heads.
template <typename Body>
void for_each_blind_part(const AttentionCall& call, Body&& body) {
  for (size_t row = 0; row < call.blind_spans.size(); ++row)
    for (const LocalSpan& span : call.blind_spans[row])
      body(QueryPart{static_cast<int64_t>(row),
                     {span.local_begin, span.local_begin + span.positions.length()},
                     {0, call.shape.heads}});
}

// delta where the block reads it or it is there.
Tensor delta_for(const AttentionCall& call, OutputGradient& gradient, const AttentionBlock& block) {
  if (gradient.has_delta) return gradient.delta;
  if (!attention_reads_delta(call.device, block)) return {};
  write_delta(call.device, gradient.out, gradient.d_out, gradient.delta);
  gradient.has_delta = true;
  return gradient.delta;
}

}  // namespace

void finish_blind_queries(const AttentionCall& call, const Tensor& out, const Tensor& lse) {
  for_each_blind_part(call, [&](const QueryPart& part) {
    fill(call.device, part.of_heads(out), 0);
    fill(call.device, part.of_scalars(lse), -std::numeric_limits<double>::infinity());
  });
}

void finish_blind_queries(const AttentionCall& call, const Tensor& d_query) {
  for_each_blind_part(call, [&](const QueryPart& part) { fill(call.device, part.of_heads(d_query), 0); });
}

void write_delta(Device& device, const Tensor& out, const Tensor& d_out, Tensor delta) {
  for (int64_t b = 0; b < out.dim(0); ++b) attention_delta(device, entry(out, b), entry(d_out, b), entry(delta, b));
}

void attend_forward(const AttentionCall& call, MetQueries& met, const KeyBlock& keys, const SpanSubset& queries,
                    Tensor out, Tensor lse) {
  for_each_block(call, met, keys, queries, [&](const BlockPart& part, const Rectangle&) {
    attention_block_forward(call.device, part.block, part.is_first ? StateUse::begin : StateUse::add,
                            part.queries.of_heads(out), part.queries.of_scalars(lse));
  });
}

void attend_backward(const AttentionCall& call, MetQueries& met, OutputGradient& gradient, const KeyBlock& keys,
                     Tensor d_key, Tensor d_value) {
  KeyGradients key_gradients(call, keys, d_key, d_value);
  for_each_block(call, met, keys, {}, [&](const BlockPart& part, const Rectangle& rectangle) {
    const QueryPart& queries = part.queries;
    const Accumulate d_query_use = part.is_first ? Accumulate::no : Accumulate::yes;
    const Tensor delta = delta_for(call, gradient, part.block);
    attention_block_backward(
        call.device, part.block, gradient.out.defined() ? queries.of_heads(gradient.out) : Tensor(),
        queries.of_heads(gradient.d_out), queries.of_scalars(gradient.lse),
        delta.defined() ? queries.of_scalars(delta) : Tensor(), d_query_use, key_gradients.begin(rectangle),
        queries.of_heads(gradient.d_query), d_key.slice(0, part.keys.begin, part.keys.end),
        d_value.slice(0, part.keys.begin, part.keys.end));
  });
  key_gradients.finish();
}

void attend_own_forward(const AttentionCall& call, MetQueries& met, const SpanSubset& queries, Tensor out, Tensor lse) {
  for_each_own_row(call, [&](const KeyBlock& keys, int64_t) { attend_forward(call, met, keys, queries, out, lse); });
}

void attend_own_backward(const AttentionCall& call, MetQueries& met, OutputGradient& gradient, Tensor d_key,
                         Tensor d_value) {
  for_each_own_row(call, [&](const KeyBlock& keys, int64_t row) {
    attend_backward(call, met, gradient, keys, entry(d_key, row), entry(d_value, row));
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
