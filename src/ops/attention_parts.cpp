// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_parts.h"

#include <algorithm>

#include "base/error.h"

namespace farspan {
namespace {

// The run's visible interval at its query i, cut to the block's keys and counted from the first of them.
struct Cut {
  int64_t lo = 0;
  int64_t hi = 0;
};

Cut cut_at(const VisibleRun& run, int64_t i, int64_t key_begin, int64_t keys) {
  return {std::clamp<int64_t>(run.lo + i * run.lo_step - key_begin, 0, keys),
          std::clamp<int64_t>(run.hi + i * run.hi_step - key_begin, 0, keys)};
}

// Numbers in [0, count] between which the cut interval's ends stay or move on evenly, and it is empty throughout or
// never: where a moving end meets the block's first or last key, or the other end.
std::vector<int64_t> breaks(const VisibleRun& run, int64_t key_begin, int64_t keys) {
  std::vector<int64_t> at{0, run.count};
  const auto add = [&](int64_t i) {
    if (i > 0 && i < run.count) at.push_back(i);
  };
  for (const int64_t edge : {key_begin, key_begin + keys}) {
    if (run.lo_step > 0) add(edge - run.lo);
    if (run.hi_step > 0) add(edge - run.hi);
  }
  // The first query that sees a key stands one behind the meeting.
  if (run.hi_step > 0) add(key_begin - run.hi + 1);
  if (run.hi_step > run.lo_step) add(run.lo - run.hi + 1);
  if (run.lo_step > run.hi_step) add(run.hi - run.lo);
  std::sort(at.begin(), at.end());
  at.erase(std::unique(at.begin(), at.end()), at.end());
  return at;
}

// Queries [begin, begin + count) of the block whose cut interval moves evenly: [lo + i lo_step, hi + i hi_step).
struct Piece {
  int64_t begin = 0;
  int64_t count = 0;
  Cut first;
  int lo_step = 0;
  int hi_step = 0;

  bool empty() const { return first.lo >= first.hi; }
  // Query by query one key more, and no other: documents of one token, or a window of one.
  bool one_key_each() const { return count > 1 && lo_step == 1 && hi_step == 1 && first.hi - first.lo == 1; }
  int64_t key_begin() const { return first.lo; }
  int64_t key_end() const { return first.hi + (count - 1) * hi_step; }
  int64_t pairs() const {
    const int64_t growth = hi_step - lo_step;
    return count * (first.hi - first.lo) + growth * (count * (count - 1) / 2);
  }
};

// A few documents of one token may have the first token of a longer one behind them: each is a piece of its own. Of
// more than these, a window of one as a rule, nothing would come of it.
constexpr int64_t kMostSingles = 64;

std::vector<Piece> pieces_of(std::span<const VisibleRun> runs, int64_t key_begin, int64_t keys) {
  std::vector<Piece> pieces;
  for (const VisibleRun& run : runs) {
    const std::vector<int64_t> at = breaks(run, key_begin, keys);
    for (size_t b = 0; b + 1 < at.size(); ++b) {
      const int64_t i = at[b];
      Piece piece{run.first + i, at[b + 1] - i, cut_at(run, i, key_begin, keys)};
      if (piece.count > 1) {
        const Cut second = cut_at(run, i + 1, key_begin, keys);
        piece.lo_step = static_cast<int>(second.lo - piece.first.lo);
        piece.hi_step = static_cast<int>(second.hi - piece.first.hi);
      }
      if (!piece.one_key_each() || piece.count > kMostSingles) {
        pieces.push_back(piece);
        continue;
      }
      for (int64_t q = 0; q < piece.count; ++q)
        pieces.push_back({piece.begin + q, 1, {piece.first.lo + q, piece.first.hi + q}});
    }
  }
  return pieces;
}

// A part under construction: pieces [first, last).
struct Group {
  size_t first = 0;
  size_t last = 0;
  int64_t key_begin = 0;
  int64_t key_end = 0;  // = key_begin: sees nothing
};

// Neighbours that see common keys come together; so do those that see nothing.
std::vector<Group> groups_of(const std::vector<Piece>& pieces) {
  std::vector<Group> groups;
  for (size_t p = 0; p < pieces.size(); ++p) {
    const Piece& piece = pieces[p];
    if (piece.empty()) {
      const bool after_nothing = !groups.empty() && groups.back().key_begin == groups.back().key_end;
      if (after_nothing)
        groups.back().last = p + 1;
      else
        groups.push_back({p, p + 1, 0, 0});
      continue;
    }
    Group group{p, p + 1, piece.key_begin(), piece.key_end()};
    // The last group with keys that reaches this one's, and all that came between, are one with it. Groups with keys
    // ascend, so no earlier one can reach it unless this one does.
    for (size_t g = groups.size(); g-- > 0;) {
      if (groups[g].key_begin == groups[g].key_end) continue;
      if (groups[g].key_end <= group.key_begin) break;
      group.first = groups[g].first;
      group.key_begin = std::min(group.key_begin, groups[g].key_begin);
      group.key_end = std::max(group.key_end, groups[g].key_end);
      groups.resize(g);
    }
    groups.push_back(group);
  }
  return groups;
}

// The form of pieces that all see keys between key_begin and key_end.
PartForm form_of(std::span<const Piece> pieces, int64_t key_begin, int64_t key_end) {
  if (key_begin == key_end) return PartForm::nothing;
  // What a query sees at its end: first rising by one from query to query, then level at the last key.
  int64_t expected = pieces[0].first.hi;
  for (const Piece& piece : pieces) {
    if (piece.empty() || piece.first.lo != key_begin || piece.lo_step != 0 || piece.first.hi != expected)
      return PartForm::other;
    if (piece.hi_step == 0 && piece.count > 1 && piece.first.hi != key_end) return PartForm::other;
    expected = std::min(key_end, piece.key_end() + 1);
  }
  return pieces[0].first.hi == key_end ? PartForm::plain : PartForm::causal;
}

// The runs cut to queries [begin, end), counted from `begin`.
std::vector<VisibleRun> runs_between(std::span<const VisibleRun> runs, int64_t begin, int64_t end) {
  std::vector<VisibleRun> cut;
  auto run =
      std::partition_point(runs.begin(), runs.end(), [&](const VisibleRun& r) { return r.first + r.count <= begin; });
  for (; run != runs.end() && run->first < end; ++run) {
    const int64_t from = std::max(begin, run->first);
    const int64_t skipped = from - run->first;
    cut.push_back({from - begin, std::min(end, run->first + run->count) - from, run->lo + skipped * run->lo_step,
                   run->hi + skipped * run->hi_step, run->lo_step, run->hi_step});
  }
  return cut;
}

}  // namespace

std::vector<AttentionPart> attention_parts(std::span<const VisibleRun> runs, int64_t key_begin, int64_t keys) {
  const std::vector<Piece> pieces = pieces_of(runs, key_begin, keys);
  std::vector<AttentionPart> parts;
  for (const Group& group : groups_of(pieces)) {
    const std::span<const Piece> own(pieces.data() + group.first, group.last - group.first);
    AttentionPart part;
    part.query_begin = own.front().begin;
    part.query_end = own.back().begin + own.back().count;
    part.key_begin = group.key_begin;
    part.key_end = group.key_end;
    part.form = form_of(own, group.key_begin, group.key_end);
    part.first_keys = part.form == PartForm::causal ? own.front().first.hi - group.key_begin : 0;
    for (const Piece& piece : own)
      if (!piece.empty()) part.pairs += piece.pairs();
    part.runs = runs_between(runs, part.query_begin, part.query_end);
    parts.push_back(std::move(part));
  }
  return parts;
}

AttentionPart join(const AttentionPart& a, const AttentionPart& b) {
  FARSPAN_CHECK(a.query_end == b.query_begin, "attention parts: queries to {} and from {} on", a.query_end,
                b.query_begin);
  AttentionPart both;
  both.query_begin = a.query_begin;
  both.query_end = b.query_end;
  const bool a_sees = a.form != PartForm::nothing;
  const bool b_sees = b.form != PartForm::nothing;
  both.key_begin = a_sees ? a.key_begin : b.key_begin;
  both.key_end = b_sees ? b.key_end : a.key_end;
  both.form = a_sees || b_sees ? PartForm::other : PartForm::nothing;
  both.pairs = a.pairs + b.pairs;
  both.runs = a.runs;
  for (VisibleRun run : b.runs) {
    run.first += a.queries();
    both.runs.push_back(run);
  }
  return both;
}

}  // namespace farspan
