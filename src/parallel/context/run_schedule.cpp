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
#include <array>
#include <optional>
#include <utility>

#include "ops/attention.h"
#include "ops/elementwise.h"
#include "parallel/context/key_schedule.h"
#include "parallel/context/step_places.h"

namespace farspan {
namespace {

// Some equal buffers that hold one step's keys and values each (or their gradients), and take turns from step to step.
class StepBuffers {
 public:
  // `capacity`: tokens times heads.
  StepBuffers(const AttentionCall& call, int64_t capacity, std::string_view name, DType dtype, int count)
      : head_dim_(call.shape.head_dim), count_(static_cast<size_t>(count)) {
    for (size_t i = 0; i < count_; ++i)
      buffers_[i] = call.arena.take(name, dtype, {2 * capacity * head_dim_}, Purpose::communication);
  }

  // (2, tokens, heads, D): all keys of step `turn`, then all values.
  Tensor of_step(size_t turn, int64_t tokens, Span heads) const {
    const int64_t elements = 2 * tokens * heads.length() * head_dim_;
    return buffers_[turn % count_].tensor().slice(0, 0, elements).reshape({2, tokens, heads.length(), head_dim_});
  }

 private:
  int64_t head_dim_;
  size_t count_;
  std::array<Buffer, 2> buffers_;
};

// Of keys (half 0) or values (half 1) of a step.
Tensor tokens_of(const Tensor& step, int half, Span tokens) {
  return entry(step, half).slice(0, tokens.begin, tokens.end);
}
Tensor tokens_of(const Tensor& step, int half, const PlacedSegment& placed) {
  return tokens_of(step, half, Span{placed.begin, placed.begin + placed.segment.tokens()});
}

// The owner's tensor at a segment, some heads of it: (B, s, K, D) -> (tokens, heads, D).
Tensor own_part(const Tensor& x, const Segment& segment, Span heads) {
  const int64_t begin = segment.keys.local_begin;
  return entry(x, segment.row).slice(0, begin, begin + segment.tokens()).slice(1, heads.begin, heads.end);
}

// What goes to, or comes from, the parcels' peers. A lone peer's parcel is one message; of several peers each segment's
// keys and each segment's values are one, since the receiver places them apart. Both ends have a parcel's segments in
// the same order.
std::vector<Message> messages(const KeySchedule& schedule, const std::vector<Parcel>& parcels, const StepPlaces& places,
                              const Tensor& step) {
  std::vector<Message> messages;
  for (size_t p = 0; p < parcels.size(); ++p) {
    if (!schedule.several_peers) {
      messages.push_back({parcels[p].peer, step});
      continue;
    }
    for (size_t i = 0; i < parcels[p].segments.size(); ++i) {
      const int64_t begin = places.begins[p][i];
      for (int half = 0; half < 2; ++half)
        messages.push_back(
            {parcels[p].peer, tokens_of(step, half, Span{begin, begin + parcels[p].segments[i].tokens()})});
    }
  }
  return messages;
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
    for (const PlacedSegment& placed : own.pieces) {
      cast(call_.device, own_part(call_.key, placed.segment, step.heads), tokens_of(sent, 0, placed));
      cast(call_.device, own_part(call_.value, placed.segment, step.heads), tokens_of(sent, 1, placed));
    }
    arrival_ = call_.cp->exchange(messages(schedule_, step.sends, own, sent),
                                  messages(schedule_, step.receives, visitors_[i], received(i)),
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

// Where what each step brings lies.
std::vector<StepPlaces> places_of_visitors(const KeySchedule& schedule) {
  std::vector<StepPlaces> places;
  for (const ExchangeStep& step : schedule.steps) places.push_back(places_by_position(step.receives));
  return places;
}

// Calls body(key block, its tokens among the step's) for all that a step brought, row by row.
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
    arrival_ = call_.cp->exchange(messages(schedule_, step.receives, visitors_[i], computed(i)),
                                  messages(schedule_, step.sends, own_, received(i)),
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
    for (const PlacedSegment& placed : own_.pieces) {
      const Tensor d_key = own_part(d_key_, placed.segment, step.heads);
      const Tensor d_value = own_part(d_value_, placed.segment, step.heads);
      add(call_.device, d_key, tokens_of(gradients, 0, placed), d_key);
      add(call_.device, d_value, tokens_of(gradients, 1, placed), d_value);
    }
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
// fit.
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

// Backward with d_key, d_value (B, s, K, D) in fp32, or in their own type where they are written once. `gradient` is a
// copy, in which delta comes into being.
void run_backward_into(const AttentionCall& call, const KeySchedule& schedule, OutputGradient gradient,
                       const Tensor& d_key, const Tensor& d_value) {
  MetQueries met(call);
  finish_blind_queries(call, gradient.d_query);
  if (call.ranks() == 1) return attend_own_backward(call, met, gradient, d_key, d_value);
  plan_largest_blocks(call, schedule);

  const std::vector<StepPlaces> visitors = places_of_visitors(schedule);
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

void run_forward(const AttentionCall& call, const KeySchedule& schedule, Tensor out, Tensor lse) {
  MetQueries met(call);
  finish_blind_queries(call, out, lse);
  if (call.ranks() == 1) return attend_own_forward(call, met, out, lse);
  plan_largest_blocks(call, schedule);
  const std::vector<StepPlaces> visitors = places_of_visitors(schedule);
  KeyTravel travel(call, schedule, visitors, "forward");
  travel.begin();
  attend_own_forward(call, met, out, lse);
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    travel.arrive(i);
    for_each_received(visitors[i], schedule.steps[i].heads, travel.received(i),
                      [&](const KeyBlock& keys, Span) { attend_forward(call, met, keys, out, lse); });
  }
}

void run_backward(const AttentionCall& call, const KeySchedule& schedule, const OutputGradient& gradient, Tensor d_key,
                  Tensor d_value) {
  const bool written_once = call.ranks() == 1 && attention_writes_rounded(call.device);
  if (written_once || d_key.dtype() == DType::f32) return run_backward_into(call, schedule, gradient, d_key, d_value);
  const Buffer sum = call.arena.take("attention.d_key_value_sum", DType::f32,
                                     {2, d_key.dim(0), d_key.dim(1), d_key.dim(2), d_key.dim(3)}, Purpose::workspace);
  run_backward_into(call, schedule, gradient, entry(sum, 0), entry(sum, 1));
  cast(call.device, entry(sum, 0), d_key);
  cast(call.device, entry(sum, 1), d_value);
}

}  // namespace farspan
