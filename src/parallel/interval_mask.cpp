// SPDX-License-Identifier: Apache-2.0
// Within one document both ends of the visible interval are a clamped line in the query position q:
//
//   end(q) = min(max(q + offset, low), high)
//
// for example causal: hi(q) = clamp(q + 1, begin, end); window w: lo(q) = clamp(q - w + 1, begin, end); an end that
// does not move has low = high. The number of visible keys below a position is such a line again, so visible pairs are
// two sums of clamped lines, each an arithmetic series between two constant parts.
#include "parallel/interval_mask.h"

#include <algorithm>
#include <array>

#include "base/error.h"

namespace farspan {
namespace {

struct ClampedLine {
  int64_t offset = 0;
  int64_t low = 0;
  int64_t high = 0;

  int64_t at(int64_t q) const { return std::clamp(q + offset, low, high); }
  int64_t first_moving() const { return low - offset; }  // the query after which it rises
  int64_t first_level() const { return high - offset; }  // and from which on it does not

  // Where [keys.begin, keys.end) is cut by this line: how many of those keys lie below it.
  ClampedLine keys_below(Span keys) const {
    const int64_t n = keys.length();
    return {offset - keys.begin, std::clamp<int64_t>(low - keys.begin, 0, n),
            std::clamp<int64_t>(high - keys.begin, 0, n)};
  }

  // Sum of at(q) over q in [queries.begin, queries.end).
  int64_t sum(Span queries) const {
    const int64_t rise = std::clamp(first_moving(), queries.begin, queries.end);  // first q that may exceed low
    const int64_t level = std::clamp(first_level(), rise, queries.end);           // first q that has reached high
    const int64_t steps = level - rise;
    int64_t total = (rise - queries.begin) * low + (queries.end - level) * high;
    total += steps * (rise + offset);
    total += steps % 2 == 0 ? steps / 2 * (steps - 1) : (steps - 1) / 2 * steps;
    return total;
  }
};

// Whether `next`, which comes right behind `run`, goes on as it does.
bool continues(const VisibleRun& run, const VisibleRun& next) {
  return next.lo == run.lo + run.count * run.lo_step && next.hi == run.hi + run.count * run.hi_step &&
         (next.count == 1 || (next.lo_step == run.lo_step && next.hi_step == run.hi_step));
}

struct VisibleEnds {
  ClampedLine lo;
  ClampedLine hi;
};

VisibleEnds ends_of(Span document, const MaskRule& rule) {
  const auto [begin, end] = document;
  // Lengths beyond the document's change nothing; cutting them here keeps the sums far from overflow.
  const int64_t window = std::min(rule.window, document.length());
  const int64_t prefix_end = begin + std::min(rule.prefix, document.length());
  VisibleEnds ends;
  ends.lo = window > 0 ? ClampedLine{1 - window, begin, end} : ClampedLine{0, begin, begin};
  if (rule.causal)
    ends.hi = {1, prefix_end, end};
  else
    ends.hi = window > 0 ? ClampedLine{window, begin, end} : ClampedLine{0, end, end};
  return ends;
}

// The first document that ends after `position`.
std::vector<Span>::const_iterator first_after(const std::vector<Span>& documents, int64_t position) {
  return std::partition_point(documents.begin(), documents.end(), [&](Span d) { return d.end <= position; });
}

// Adds the runs of these queries, which are all of one document, counted from query `origin`.
void append_runs(const VisibleEnds& ends, Span queries, int64_t origin, std::vector<VisibleRun>& runs) {
  std::array<int64_t, 6> at{queries.begin,          queries.end,          ends.lo.first_moving(), ends.lo.first_level(),
                            ends.hi.first_moving(), ends.hi.first_level()};
  for (int64_t& q : at) q = std::clamp(q, queries.begin, queries.end);
  std::sort(at.begin(), at.end());
  const size_t first_run = runs.size();
  for (size_t i = 0; i + 1 < at.size(); ++i) {
    const int64_t q = at[i];
    const int64_t count = at[i + 1] - q;
    if (count == 0) continue;
    VisibleRun run{q - origin, count, ends.lo.at(q), ends.hi.at(q), 0, 0};
    if (count > 1) {
      run.lo_step = static_cast<int>(ends.lo.at(q + 1) - run.lo);
      run.hi_step = static_cast<int>(ends.hi.at(q + 1) - run.hi);
    }
    if (runs.size() > first_run && continues(runs.back(), run))
      runs.back().count += count;
    else
      runs.push_back(run);
  }
}

}  // namespace

IntervalMask::IntervalMask(std::vector<Span> documents, MaskRule rule) : documents_(std::move(documents)), rule_(rule) {
  if (rule.window < 0) throw ConfigError(fmt::format("window_size: {} found; use 0 (no window) or more", rule.window));
  if (rule.prefix < 0) throw ConfigError(fmt::format("mask prefix: {} found; use 0 (no prefix) or more", rule.prefix));
  if (rule.window > 0 && rule.prefix > 0)
    throw ConfigError(
        fmt::format("a window ({}) and a prefix ({}) together leave a gap between the keys a query sees; "
                    "use one of them, with the other 0",
                    rule.window, rule.prefix));
  std::erase_if(documents_, [](Span d) { return d.begin == d.end; });
  int64_t reached = 0;
  for (Span d : documents_) {
    FARSPAN_CHECK(d.begin >= reached && d.end > d.begin,
                  "interval mask: document [{}, {}) after position {}; spans must ascend and not overlap", d.begin,
                  d.end, reached);
    reached = d.end;
  }
}

Span IntervalMask::visible(int64_t position) const {
  const auto document = first_after(documents_, position);
  if (document == documents_.end() || position < document->begin) return {0, 0};
  const VisibleEnds ends = ends_of(*document, rule_);
  return {ends.lo.at(position), ends.hi.at(position)};
}

void IntervalMask::fill(Span queries, std::span<int64_t> lo, std::span<int64_t> hi) const {
  FARSPAN_CHECK(std::ssize(lo) == queries.length() && std::ssize(hi) == queries.length(),
                "interval mask: {} queries into lo of {} and hi of {}", queries.length(), lo.size(), hi.size());
  std::fill(lo.begin(), lo.end(), 0);
  std::fill(hi.begin(), hi.end(), 0);
  for (auto d = first_after(documents_, queries.begin); d != documents_.end() && d->begin < queries.end; ++d) {
    const VisibleEnds ends = ends_of(*d, rule_);
    const Span inside = intersect(queries, *d);
    for (int64_t q = inside.begin; q < inside.end; ++q) {
      lo[static_cast<size_t>(q - queries.begin)] = ends.lo.at(q);
      hi[static_cast<size_t>(q - queries.begin)] = ends.hi.at(q);
    }
  }
}

std::vector<VisibleRun> IntervalMask::visible_runs(Span queries) const {
  std::vector<VisibleRun> runs;
  int64_t reached = queries.begin;
  const auto append_padding = [&](int64_t end) {
    if (reached < end) runs.push_back({reached - queries.begin, end - reached, 0, 0, 0, 0});
  };
  for (auto d = first_after(documents_, queries.begin); d != documents_.end() && d->begin < queries.end; ++d) {
    const Span inside = intersect(queries, *d);
    append_padding(inside.begin);
    append_runs(ends_of(*d, rule_), inside, queries.begin, runs);
    reached = inside.end;
  }
  append_padding(queries.end);
  return runs;
}

Span IntervalMask::visible_range(Span queries) const {
  const auto first = first_after(documents_, queries.begin);
  if (queries.empty() || first == documents_.end() || first->begin >= queries.end) return {0, 0};
  const auto last = std::partition_point(first, documents_.end(), [&](Span d) { return d.begin < queries.end; }) - 1;
  return {ends_of(*first, rule_).lo.at(std::max(queries.begin, first->begin)),
          ends_of(*last, rule_).hi.at(std::min(queries.end, last->end) - 1)};
}

int64_t IntervalMask::visible_pairs(Span queries, Span keys) const {
  if (queries.empty() || keys.empty()) return 0;
  // Only documents that meet both spans count: none ends before the later begin, none begins after the earlier end.
  const int64_t from = std::max(queries.begin, keys.begin);
  const int64_t to = std::min(queries.end, keys.end);
  int64_t pairs = 0;
  for (auto d = first_after(documents_, from); d != documents_.end() && d->begin < to; ++d) {
    const Span document_queries = intersect(queries, *d);
    const Span document_keys = intersect(keys, *d);
    const VisibleEnds ends = ends_of(*d, rule_);
    pairs += ends.hi.keys_below(document_keys).sum(document_queries) -
             ends.lo.keys_below(document_keys).sum(document_queries);
  }
  return pairs;
}

BlockKind IntervalMask::classify(Span queries, Span keys) const {
  const int64_t pairs = visible_pairs(queries, keys);
  if (pairs == 0) return BlockKind::skip;
  return pairs == queries.length() * keys.length() ? BlockKind::plain : BlockKind::masked;
}

}  // namespace farspan
