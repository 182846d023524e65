// SPDX-License-Identifier: Apache-2.0
#include "parallel/context/key_schedule.h"

#include <algorithm>

#include "base/math.h"

namespace farspan {
namespace {

// Pieces of a hop. Three buffers of a quarter hold less than the two whole ones of a ring that passes keys on.
constexpr int64_t kPiecesPerHop = 4;

int64_t piece_tokens(int64_t own_tokens, int ranks, const PieceRule& rule) {
  if (own_tokens == 0) return 0;
  const int64_t whole_hops =
      std::clamp<int64_t>(rule.least_tokens / own_tokens, 1, std::min(rule.most_hops, ranks - 1));
  return std::max(ceil_div(own_tokens, kPiecesPerHop), std::min(own_tokens * whole_hops, rule.least_tokens));
}

Parcel parcel_of(int peer, std::vector<Segment> segments) {
  Parcel parcel{peer, std::move(segments), 0};
  for (const Segment& segment : parcel.segments) parcel.tokens += segment.tokens();
  return parcel;
}

// Tokens [begin, end) of the segments, counted along them.
std::vector<Segment> cut(const std::vector<Segment>& segments, int64_t begin, int64_t end) {
  std::vector<Segment> piece;
  int64_t passed = 0;
  for (const Segment& segment : segments) {
    const Span inside = intersect({begin, end}, {passed, passed + segment.tokens()});
    if (!inside.empty()) {
      const int64_t skipped = inside.begin - passed;
      const int64_t first = segment.keys.positions.begin + skipped;
      piece.push_back({segment.row, {{first, first + inside.length()}, segment.keys.local_begin + skipped}});
    }
    passed += segment.tokens();
  }
  return piece;
}

// Piece `index` of `pieces` of the segments, as equal as whole tiles of attention allow: of at most `capacity` tokens
// if all of them have room.
std::vector<Segment> piece_of(const std::vector<Segment>& segments, int64_t index, int64_t pieces, int64_t capacity) {
  constexpr int64_t kMultiple = 128;  // of tokens
  int64_t tokens = 0;
  for (const Segment& segment : segments) tokens += segment.tokens();
  const int64_t even = ceil_div(tokens, pieces);
  const int64_t size = round_up(even, kMultiple) <= capacity ? round_up(even, kMultiple) : even;
  return cut(segments, index * size, (index + 1) * size);
}

void add_parcel(std::vector<Parcel>& parcels, int peer, std::vector<Segment> segments) {
  if (!segments.empty()) parcels.push_back(parcel_of(peer, std::move(segments)));
}

// The tokens that ranks receive at a hop.
struct HopNeeds {
  int64_t largest = 0;
  std::vector<int64_t> tokens;  // of each rank; empty: `largest` is all that is known, and counts for each

  int64_t of(size_t reader) const { return tokens.empty() ? largest : tokens[reader]; }
};

// Where one rank receives `enough` or more, which of all that a rank owns one of the first readers mostly wants, the
// others are not looked at.
HopNeeds needs_of_hop(const KeyNeeds& needs, int ranks, int hop, int64_t enough) {
  HopNeeds found;
  for (int reader = 0; reader < ranks; ++reader) {
    const int64_t mine = needs.tokens(reader, (reader - hop + ranks) % ranks);
    if (mine >= enough) return {mine, {}};
    if (found.tokens.empty()) found.tokens.resize(static_cast<size_t>(ranks));
    found.tokens[static_cast<size_t>(reader)] = mine;
    found.largest = std::max(found.largest, mine);
  }
  return found;
}

// The most tokens that any rank receives, or sends, if all of a pass travels at once; `enough` or more where there is
// one of as many.
int64_t largest_total(const KeyNeeds& needs, int ranks, int64_t enough) {
  int64_t largest = 0;
  std::vector<int64_t> sent(static_cast<size_t>(ranks));
  for (int reader = 0; reader < ranks && largest < enough; ++reader) {
    int64_t received = 0;
    for (int owner = 0; owner < ranks; ++owner) {
      if (owner == reader) continue;
      const int64_t tokens = needs.tokens(reader, owner);
      received += tokens;
      sent[static_cast<size_t>(owner)] += tokens;
      largest = std::max(largest, sent[static_cast<size_t>(owner)]);
    }
    largest = std::max(largest, received);
  }
  return largest;
}

// Key/value heads of a step, of `heads` in all: in as few and as equal steps as `most` heads a step allow.
int64_t heads_of_step(int64_t heads, int64_t most) {
  return ceil_div(heads, ceil_div(heads, std::clamp<int64_t>(most, 1, heads)));
}

// Hops that travel in one step: what each rank receives in them all, and what it sends.
class HopGroup {
 public:
  explicit HopGroup(int ranks) : received_(static_cast<size_t>(ranks)), sent_(received_.size()) {}

  bool empty() const { return last_ == 0; }
  int first() const { return first_; }
  int last() const { return last_; }

  // Adds a hop behind last() at which ranks receive `needs`, unless some rank received more than `most_received`
  // tokens then, or sent more than `most_sent`, those that several ranks want once for each.
  bool add(int hop, const HopNeeds& needs, int64_t most_received, int64_t most_sent) {
    const size_t ranks = received_.size();
    std::vector<int64_t> received = received_, sent = sent_;
    for (size_t reader = 0; reader < ranks; ++reader) {
      int64_t& in = received[reader];
      int64_t& out = sent[(reader + ranks - static_cast<size_t>(hop)) % ranks];
      in += needs.of(reader);
      out += needs.of(reader);
      if (in > most_received || out > most_sent) return false;
    }
    received_ = std::move(received);
    sent_ = std::move(sent);
    if (empty()) first_ = hop;
    last_ = hop;
    return true;
  }

 private:
  std::vector<int64_t> received_, sent_;
  int first_ = 0, last_ = 0;
};

bool anybody_needs_anything(const KeyNeeds& needs, int ranks) {
  for (int hop = 1; hop < ranks; ++hop)
    if (needs_of_hop(needs, ranks, hop, 1).largest > 0) return true;
  return false;
}

}  // namespace

ScheduleSizes p2p_sizes(int64_t own_tokens, int ranks, const ContextAttentionShape& shape, const PieceRule& rule) {
  const int64_t piece = piece_tokens(own_tokens, ranks, rule);
  return {.heads = shape.kv_heads,
          .capacity = checked_mul(piece, shape.kv_heads),
          .sent = checked_mul(std::min(piece, own_tokens), shape.kv_heads),
          .several = piece < checked_mul(own_tokens, ranks - 1),
          .overlap = true};
}

ScheduleSizes all_gather_sizes(int64_t own_tokens, int ranks, const ContextAttentionShape& shape, DType dtype,
                               Pass pass, const AllGatherOptions& options) {
  const int64_t others_tokens = checked_mul(own_tokens, ranks - 1);
  const auto sizes = [&](int64_t heads) {
    const int64_t capacity = checked_mul(others_tokens, heads);
    return ScheduleSizes{.heads = heads,
                         .capacity = capacity,
                         .sent = std::min(capacity, checked_mul(own_tokens, shape.kv_heads)),
                         .several = heads < shape.kv_heads,
                         .overlap = options.overlap};
  };
  const int64_t held = own_tokens * shape.heads * shape.head_dim * (3 * size_of(dtype) + 4);
  const int64_t limit = options.buffer_size > 0 ? options.buffer_size : held;
  int64_t heads = shape.kv_heads;
  while (heads > 1 && buffer_bytes(sizes(heads), shape, dtype, pass) > limit) --heads;
  return sizes(heads_of_step(shape.kv_heads, heads));
}

int64_t buffer_bytes(const ScheduleSizes& sizes, const ContextAttentionShape& shape, DType dtype, Pass pass) {
  const int64_t gradient_bytes = pass == Pass::backward ? (sizes.buffers() + 1) * 4 : 0;
  const int64_t elements = 2 * shape.head_dim;
  return checked_mul(checked_mul(elements, sizes.sent), size_of(dtype)) +
         checked_mul(checked_mul(elements, sizes.capacity), sizes.buffers() * size_of(dtype) + gradient_bytes);
}

KeySchedule p2p_schedule(const AttentionCall& call, Pass pass) {
  const int ranks = call.ranks();
  const int me = call.rank();
  const PieceRule& rule = call.device.targets_cuda() ? kPiecesOnGpu : kPiecesOnCpu;
  const int64_t own_tokens = call.rows.count() * call.local_length();
  KeySchedule schedule{p2p_sizes(own_tokens, ranks, call.shape, rule), {}};
  const Span heads{0, schedule.sizes.heads};
  const int64_t piece = schedule.sizes.capacity / schedule.sizes.heads;

  const KeyNeeds needs(call.rows, ranks);
  const auto add_hop = [&](ExchangeStep& step, int hop, int64_t p, int64_t pieces) {
    const int source = (me - hop + ranks) % ranks;
    const int target = (me + hop) % ranks;
    add_parcel(step.sends, target, piece_of(needs.segments(target, me), p, pieces, piece));
    add_parcel(step.receives, source, piece_of(needs.segments(me, source), p, pieces, piece));
  };
  std::vector<HopNeeds> hops;  // hop h is entry h - 1
  for (int hop = 1; hop < ranks; ++hop) hops.push_back(needs_of_hop(needs, ranks, hop, own_tokens));
  const auto of_hop = [&](int hop) -> const HopNeeds& { return hops[static_cast<size_t>(hop - 1)]; };
  // It fits in a piece, and no rank wants all that another has.
  const auto brings_little = [&](const HopNeeds& hop) { return hop.largest <= piece && hop.largest < own_tokens; };
  HopGroup group(ranks);
  const auto end_group = [&] {
    if (group.empty()) return;
    const bool alone = group.first() == group.last();
    const std::string name =
        alone ? fmt::format("hop {}", group.last()) : fmt::format("hops {}-{}", group.first(), group.last());
    ExchangeStep step{name, heads, {}, {}, alone && !brings_little(of_hop(group.last()))};
    for (int hop = group.first(); hop <= group.last(); ++hop) add_hop(step, hop, 0, 1);
    schedule.steps.push_back(std::move(step));
    group = HopGroup(ranks);
  };
  if (pass == Pass::forward && std::all_of(hops.begin(), hops.end(), brings_little)) {
    // All as one step, which may fill both of the buffers that take turns else. What is sent to several is packed once.
    // Not in backward, where what comes home has one buffer, and scratch is planned for the keys of one.
    const int64_t most_sent = piece < own_tokens ? piece : own_tokens * ranks;
    bool fits = true;
    for (int hop = 1; hop < ranks && fits; ++hop)
      if (of_hop(hop).largest > 0) fits = group.add(hop, of_hop(hop), piece * schedule.sizes.buffers(), most_sent);
    if (fits) {
      end_group();
      return schedule;
    }
    group = HopGroup(ranks);
  }
  for (int hop = 1; hop < ranks; ++hop) {
    const HopNeeds& hop_needs = of_hop(hop);
    if (hop_needs.largest == 0) continue;
    if (hop_needs.largest <= piece) {
      if (group.add(hop, hop_needs, piece, piece)) continue;
      end_group();
      FARSPAN_CHECK(group.add(hop, hop_needs, piece, piece), "p2p: hop {} does not fit where {} tokens do", hop, piece);
      continue;
    }
    end_group();
    const int64_t pieces = ceil_div(hop_needs.largest, piece);
    for (int64_t p = 0; p < pieces; ++p) {
      ExchangeStep step{fmt::format("hop {}.{}", hop, p), heads, {}, {}, true};
      add_hop(step, hop, p, pieces);
      schedule.steps.push_back(std::move(step));
    }
  }
  end_group();
  return schedule;
}

KeySchedule all_gather_schedule(const AttentionCall& call, Pass pass, const AllGatherOptions& options) {
  const int ranks = call.ranks();
  const int me = call.rank();
  KeySchedule schedule{
      all_gather_sizes(call.rows.count() * call.local_length(), ranks, call.shape, call.dtype(), pass, options), {}};
  const KeyNeeds needs(call.rows, ranks);
  if (!anybody_needs_anything(needs, ranks)) return schedule;
  const ScheduleSizes& sizes = schedule.sizes;
  // From `enough` tokens on there is no room for another head.
  const int64_t enough = sizes.capacity / (sizes.heads + 1) + 1;
  const int64_t tokens = std::clamp<int64_t>(largest_total(needs, ranks, enough), 1, sizes.capacity / sizes.heads);
  const int64_t group = heads_of_step(call.shape.kv_heads, sizes.capacity / tokens);
  ExchangeStep whole;
  for (int hop = 1; hop < ranks; ++hop) {
    const int source = (me - hop + ranks) % ranks;
    const int target = (me + hop) % ranks;
    add_parcel(whole.sends, target, needs.segments(target, me));
    add_parcel(whole.receives, source, needs.segments(me, source));
  }
  for (int64_t head = 0; head < call.shape.kv_heads; head += group) {
    ExchangeStep step = whole;
    step.heads = {head, std::min(head + group, call.shape.kv_heads)};
    step.name = fmt::format("heads {}-{}", step.heads.begin, step.heads.end - 1);
    schedule.steps.push_back(std::move(step));
  }
  return schedule;
}

}  // namespace farspan
