// SPDX-License-Identifier: Apache-2.0
// Runs a KeySchedule. While one step's keys and values are attended to, the next step's are under way; in backward the
// gradients of the step before travel home at the same time.
//
//   buffers (of capacity tokens x heads)   keys, values      fp32 gradients
//     on their way out                     1 (of `sent`)     computed into and sent from: 1, or 2 taking turns
//     received into                        1, or 2           1
//
// Two take turns where there can be several steps and they overlap; a send buffer is free again as soon as its step has
// arrived, so one is enough.
#include <algorithm>
#include <optional>
#include <utility>

#include "ops/attention.h"
#include "ops/elementwise.h"
#include "parallel/context/key_schedule.h"
#include "parallel/context/late_queries.h"
#include "parallel/context/step_places.h"

namespace farspan {
namespace {

// Some equal parts of a buffer that hold one step's keys and values each (or their gradients), and take turns from step
// to step. The one step of a schedule may use all of them.
class StepBuffers {
 public:
  // `capacity`: tokens times heads.
  StepBuffers(const AttentionCall& call, int64_t capacity, std::string_view name, DType dtype, int count)
      : head_dim_(call.shape.head_dim),
        part_(2 * capacity * head_dim_),
        count_(count),
        buffer_(call.arena.take(name, dtype, {part_ * count}, Purpose::communication)) {}

  // (2, tokens, heads, D): all keys of step `turn`, then all values.
  Tensor of_step(size_t turn, int64_t tokens, Span heads) const {
    const int64_t begin = static_cast<int64_t>(turn) % count_ * part_;
    const int64_t elements = 2 * tokens * heads.length() * head_dim_;
    return buffer_.tensor().slice(0, begin, begin + elements).reshape({2, tokens, heads.length(), head_dim_});
  }

 private:
  int64_t head_dim_;
  int64_t part_;  // elements
  int64_t count_;
  Buffer buffer_;
};

// Of keys (half 0) or values (half 1) of a step.
Tensor tokens_of(const Tensor& step, int half, Span tokens) {
  return entry(step, half).slice(0, tokens.begin, tokens.end);
}
// Both, of a segment: (2, tokens, heads, D).
Tensor both_of(const Tensor& step, const PlacedSegment& placed) {
  return step.slice(1, placed.begin, placed.begin + placed.segment.tokens());
}

// The owner's tensor at a segment, some heads of it: (B, s, K, D) -> (tokens, heads, D).
Tensor own_part(const Tensor& x, const Segment& segment, Span heads) {
  const int64_t begin = segment.keys.local_begin;
  return entry(x, segment.row).slice(0, begin, begin + segment.tokens()).slice(1, heads.begin, heads.end);
}

// What goes to, or comes from, the parcels' peers. Of a step that is not whole each segment's keys and each segment's
// values are a message, since the receiver may place segments apart. Both ends have a parcel's segments in the same
// order.
std::vector<Message> messages(const std::vector<Parcel>& parcels, const StepPlaces& places, bool whole,
                              const Tensor& step) {
  std::vector<Message> messages;
  if (whole) {
    for (const Parcel& parcel : parcels) messages.push_back({parcel.peer, step});
    return messages;
  }
  for (size_t p = 0; p < parcels.size(); ++p)
    for (size_t i = 0; i < parcels[p].segments.size(); ++i) {
      const int64_t begin = places.begins[p][i];
      for (int half = 0; half < 2; ++half)
        messages.push_back(
            {parcels[p].peer, tokens_of(step, half, Span{begin, begin + parcels[p].segments[i].tokens()})});
    }
  return messages;
}

// Calls op(keys and values, their place in a step), both (2, tokens, heads, D): once where the two lie alike, as in a
// row of queries, keys and values, else for each.
template <typename Op>
void for_both(const Tensor& key, const Tensor& value, const Tensor& step, Op&& op) {
  const int64_t distance = static_cast<const char*>(value.raw()) - static_cast<const char*>(key.raw());
  const int64_t size = size_of(key.dtype());
  bool alike = distance > 0 && distance % size == 0;
  for (int d = 0; d < 3; ++d) alike = alike && key.stride(d) == value.stride(d);
  if (alike)
    return op(Tensor(key.raw(), key.dtype(), {2, key.dim(0), key.dim(1), key.dim(2)},
                     {distance / size, key.stride(0), key.stride(1), key.stride(2)}),
              step);
  op(key, entry(step, 0));
  op(value, entry(step, 1));
}

// Brings the keys and values of step after step to this rank.
class KeyTravel {
 public:
  KeyTravel(const AttentionCall& call, const KeySchedule& schedule, const std::vector<StepPlaces>& visitors,
            std::string_view pass)
      : call_(call),
        schedule_(schedule),
        visitors_(visitors),
        pass_(pass),
        sent_(call, schedule.sizes.sent, "attention.sent_key_value", call.dtype(), 1),
        received_(call, schedule.sizes.capacity, "attention.received_key_value", call.dtype(),
                  schedule.sizes.buffers()) {}

  // Packs and sends what step i wants of this rank; step i - 1 has arrived.
  void start(size_t i) {
    if (i >= schedule_.steps.size()) return;
    const ExchangeStep& step = schedule_.steps[i];
    const StepPlaces own = places_by_position(step.sends);
    const Tensor sent = sent_.of_step(i, own.tokens, step.heads);
    for (const PlacedSegment& placed : own.pieces)
      for_both(own_part(call_.key, placed.segment, step.heads), own_part(call_.value, placed.segment, step.heads),
               both_of(sent, placed), [&](const Tensor& from, const Tensor& to) { cast(call_.device, from, to); });
    arrival_ = call_.cp->exchange(messages(step.sends, own, step.whole, sent),
                                  messages(step.receives, visitors_[i], step.whole, received(i)),
                                  fmt::format("attention {} key/value {}", pass_, step.name));
  }

  // Begins with the first step, or leaves it to arrive() where steps do not overlap.
  void begin() {
    if (schedule_.sizes.overlap) start(0);
  }

  // Step i is here when this returns, and the next one on its way.
  void arrive(size_t i) {
    if (!schedule_.sizes.overlap) start(i);
    arrival_.wait();
    if (schedule_.sizes.overlap) start(i + 1);
  }

  // Copies the keys and values of this rank that late queries see together with those of the one step to their places
  // there.
  void place_own(const std::vector<Segment>& own) const {
    for (size_t s = 0; s < own.size(); ++s) {
      const Span heads = schedule_.steps[0].heads;
      const Tensor to = both_of(received(0), {own[s], visitors_[0].begins.back()[s]});
      for_both(own_part(call_.key, own[s], heads), own_part(call_.value, own[s], heads), to,
               [&](const Tensor& from, const Tensor& place) { cast(call_.device, from, place); });
    }
  }

  // What step i brought, as visitors[i] places it.
  Tensor received(size_t i) const { return received_.of_step(i, visitors_[i].tokens, schedule_.steps[i].heads); }

 private:
  const AttentionCall& call_;
  const KeySchedule& schedule_;
  const std::vector<StepPlaces>& visitors_;
  std::string_view pass_;
  StepBuffers sent_;
  StepBuffers received_;
  Work arrival_;
};

// Where what each step brings lies, and between it this rank's keys that late queries see: the last parcel's.
std::vector<StepPlaces> places_of_visitors(const AttentionCall& call, const KeySchedule& schedule,
                                           const LateQueries& late) {
  std::vector<StepPlaces> places;
  for (const ExchangeStep& step : schedule.steps) {
    std::vector<Parcel> parcels = step.receives;
    if (late.any()) parcels.push_back({call.rank(), late.own_keys()});
    places.push_back(places_by_position(parcels));
  }
  return places;
}

// Calls body(key block, its tokens among the step's) for all that lies in a step's places, row by row. Neighbours in
// the row are one segment.
template <typename Body>
void for_each_received(const StepPlaces& places, Span heads, const Tensor& received, Body&& body) {
  for (auto piece = places.pieces.begin(); piece != places.pieces.end();) {
    std::vector<Segment> segments;
    Span tokens{piece->begin, piece->begin};
    for (; piece != places.pieces.end(); ++piece) {
      const Segment& next = piece->segment;
      if (!segments.empty() && next.row != segments.back().row) break;
      tokens.end += next.tokens();
      Span* const last = segments.empty() ? nullptr : &segments.back().keys.positions;
      if (last != nullptr && last->end == next.keys.positions.begin)
        last->end = next.keys.positions.end;
      else
        segments.push_back(next);
    }
    body(KeyBlock{segments, heads, tokens_of(received, 0, tokens), tokens_of(received, 1, tokens)}, tokens);
  }
}

// Brings gradients of visited keys back to their owners, who add them to their own.
class GradientTravel {
 public:
  GradientTravel(const AttentionCall& call, const KeySchedule& schedule, const std::vector<StepPlaces>& visitors,
                 const Tensor& d_key, const Tensor& d_value)
      : call_(call),
        schedule_(schedule),
        visitors_(visitors),
        d_key_(d_key),
        d_value_(d_value),
        computed_(call, schedule.sizes.capacity, "attention.visitor_d_key_value", DType::f32, schedule.sizes.buffers()),
        received_(call, schedule.sizes.capacity, "attention.received_d_key_value", DType::f32, 1) {}

  // Where the gradients of what step i brought are to be written, as that is placed.
  Tensor computed(size_t i) const { return computed_.of_step(i, visitors_[i].tokens, schedule_.steps[i].heads); }

  // Sends home what step i added up, once the step before it has been taken in.
  void send(size_t i) {
    take_in();
    const ExchangeStep& step = schedule_.steps[i];
    own_ = places_by_parcel(step.sends);
    arrival_ = call_.cp->exchange(messages(step.receives, visitors_[i], step.whole, computed(i)),
                                  messages(step.sends, own_, step.whole, received(i)),
                                  fmt::format("attention backward d_key/d_value {}", step.name));
    under_way_ = i;
    if (!schedule_.sizes.overlap) take_in();
  }

  // Waits for what is under way and adds it.
  void take_in() {
    if (!under_way_) return;
    arrival_.wait();
    const ExchangeStep& step = schedule_.steps[*under_way_];
    const Tensor gradients = received(*under_way_);
    for (const PlacedSegment& placed : own_.pieces)
      for_both(own_part(d_key_, placed.segment, step.heads), own_part(d_value_, placed.segment, step.heads),
               both_of(gradients, placed),
               [&](const Tensor& sum, const Tensor& more) { add(call_.device, sum, more, sum); });
    under_way_.reset();
  }

 private:
  Tensor received(size_t i) const { return received_.of_step(i, own_.tokens, schedule_.steps[i].heads); }

  const AttentionCall& call_;
  const KeySchedule& schedule_;
  const std::vector<StepPlaces>& visitors_;
  Tensor d_key_;
  Tensor d_value_;
  StepBuffers computed_;
  StepBuffers received_;
  Work arrival_;
  std::optional<size_t> under_way_;
  StepPlaces own_;  // of what is under way
};

// Scratch for any block that rows of these lengths can bring, however they are dealt to the ranks and whatever their
// masks leave out: own keys with all heads, and received ones, of which the more heads there are in a step the fewer
// fit. A forward step that fills both buffers has more keys than these; forward's scratch does not depend on them.
void plan_largest_blocks(const AttentionCall& call, const KeySchedule& schedule) {
  if (!call.device.dry() || !call.device.targets_cuda()) return;
  const auto plan = [&](int64_t keys, int64_t kv_heads) {
    const int64_t heads = kv_heads * (call.shape.heads / call.shape.kv_heads);
    const auto tensor = [&](const Tensor& x, int64_t tokens, int64_t count) {
      return Tensor(x.raw(), x.dtype(), {tokens, count, call.shape.head_dim});
    };
    AttentionBlock block;
    block.query = tensor(call.query, call.local_length(), heads);
    block.key = tensor(call.key, keys, kv_heads);
    block.value = tensor(call.value, keys, kv_heads);
    block.lo = entry(call.lo, 0);
    block.hi = entry(call.hi, 0);
    block.dropout = call.dropout;
    attention_plan_scratch(call.device, block);
  };
  plan(call.local_length(), call.shape.kv_heads);
  for (int64_t kv_heads = schedule.sizes.heads; kv_heads <= call.shape.kv_heads; ++kv_heads)
    plan(std::max<int64_t>(1, schedule.sizes.capacity / kv_heads), kv_heads);
}

// (2, s, K, D) of a row of both sums (2, B, s, K, D).
Tensor row_of_both(const Tensor& sums, int64_t row) {
  const Tensor of_row = sums.slice(1, row, row + 1);
  return Tensor(of_row.raw(), of_row.dtype(), {2, of_row.dim(2), of_row.dim(3), of_row.dim(4)},
                {of_row.stride(0), of_row.stride(2), of_row.stride(3), of_row.stride(4)});
}

// Backward with d_key, d_value (B, s, K, D) in fp32, or in their own type where they are written once. `gradient` is a
// copy, in which delta comes into being.
void run_backward_into(const AttentionCall& call, const KeySchedule& schedule, OutputGradient gradient,
                       const Tensor& d_key, const Tensor& d_value) {
  const LateQueries none;
  MetQueries met(call);
  finish_blind_queries(call, gradient.d_query);
  if (call.ranks() == 1) return attend_own_backward(call, met, gradient, d_key, d_value);
  plan_largest_blocks(call, schedule);

  const std::vector<StepPlaces> visitors = places_of_visitors(call, schedule, none);
  KeyTravel travel(call, schedule, visitors, "backward");
  GradientTravel home(call, schedule, visitors, d_key, d_value);
  travel.begin();
  attend_own_backward(call, met, gradient, d_key, d_value);
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    travel.arrive(i);
    const Tensor sums = home.computed(i);
    for_each_received(visitors[i], schedule.steps[i].heads, travel.received(i), [&](const KeyBlock& keys, Span tokens) {
      attend_backward(call, met, gradient, keys, tokens_of(sums, 0, tokens), tokens_of(sums, 1, tokens));
    });
    home.send(i);
  }
  home.take_in();
}

}  // namespace

void run_forward(const AttentionCall& call, const KeySchedule& schedule, const LateQueries& late, Tensor out,
                 Tensor lse) {
  MetQueries met(call);
  finish_blind_queries(call, out, lse);
  if (call.ranks() == 1) return attend_own_forward(call, met, {}, out, lse);
  plan_largest_blocks(call, schedule);
  const std::vector<StepPlaces> visitors = places_of_visitors(call, schedule, late);
  KeyTravel travel(call, schedule, visitors, "forward");
  travel.begin();
  travel.place_own(late.own_keys());
  attend_own_forward(call, met, late.early(), out, lse);
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    travel.arrive(i);
    for_each_received(visitors[i], schedule.steps[i].heads, travel.received(i),
                      [&](const KeyBlock& keys, Span) { attend_forward(call, met, keys, late.late(), out, lse); });
  }
}

void run_backward(const AttentionCall& call, const KeySchedule& schedule, const OutputGradient& gradient, Tensor d_key,
                  Tensor d_value) {
  const bool written_once = call.ranks() == 1 && attention_writes_rounded(call.device);
  if (written_once || d_key.dtype() == DType::f32) return run_backward_into(call, schedule, gradient, d_key, d_value);
  const Buffer sum = call.arena.take("attention.d_key_value_sum", DType::f32,
                                     {2, d_key.dim(0), d_key.dim(1), d_key.dim(2), d_key.dim(3)}, Purpose::workspace);
  run_backward_into(call, schedule, gradient, entry(sum, 0), entry(sum, 1));
  for (int64_t row = 0; row < d_key.dim(0); ++row)
    for_both(entry(d_key, row), entry(d_value, row), row_of_both(sum, row),
             [&](const Tensor& rounded, const Tensor& each) { cast(call.device, each, rounded); });
}

}  // namespace farspan
