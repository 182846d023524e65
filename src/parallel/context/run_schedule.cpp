// SPDX-License-Identifier: Apache-2.0
// Runs a KeySchedule. While one step's keys and values are attended to, the next step's are under way; in backward the
// gradients of the step before travel home at the same time.
//
//   buffers (of capacity tokens x heads)   keys, values      fp32 gradients
//     on their way out                     1                 computed into and sent from: 1, or 2 taking turns
//     received into                        1, or 2           1
//
// Two take turns where there can be several steps and they overlap; a send buffer is free again as soon as its step has
// arrived, so one is enough.
#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "ops/elementwise.h"
#include "parallel/context/key_schedule.h"

namespace farspan {
namespace {

// A parcel's segment, and where its tokens lie among all tokens of the step that a rank sends, or receives.
struct PlacedSegment {
  Segment segment;
  size_t parcel = 0;
  int64_t begin = 0;
};

// In the order of their places.
using Placement = std::vector<PlacedSegment>;

enum class Order {
  parcels,   // one parcel behind the other
  positions  // as the tokens stand in their rows, whoever owns them: neighbours in the row are then one block of keys
};

Placement place(const std::vector<Parcel>& parcels, Order order) {
  Placement placement;
  for (size_t p = 0; p < parcels.size(); ++p)
    for (const Segment& segment : parcels[p].segments) placement.push_back({segment, p, 0});
  if (order == Order::positions)
    std::stable_sort(placement.begin(), placement.end(), [](const PlacedSegment& a, const PlacedSegment& b) {
      return std::pair(a.segment.row, a.segment.keys.positions.begin) <
             std::pair(b.segment.row, b.segment.keys.positions.begin);
    });
  int64_t begin = 0;
  for (PlacedSegment& placed : placement) {
    placed.begin = begin;
    begin += placed.segment.tokens();
  }
  return placement;
}

int64_t tokens_of(const Placement& placement) {
  return placement.empty() ? 0 : placement.back().begin + placement.back().segment.tokens();
}

// Some equal buffers that hold one step's keys and values each (or their gradients), and take turns from step to step.
class StepBuffers {
 public:
  StepBuffers(const AttentionCall& call, const KeySchedule& schedule, std::string_view name, DType dtype, int count)
      : head_dim_(call.shape.head_dim), count_(static_cast<size_t>(count)) {
    for (size_t i = 0; i < count_; ++i)
      buffers_[i] = call.arena.take(name, dtype, {2 * schedule.sizes.capacity * head_dim_}, Purpose::communication);
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
// keys and each segment's values are one, since the receiver places them apart.
std::vector<Message> messages(const KeySchedule& schedule, const std::vector<Parcel>& parcels,
                              const Placement& placement, const Tensor& step) {
  std::vector<Message> messages;
  if (!schedule.several_peers) {
    for (const Parcel& parcel : parcels) messages.push_back({parcel.peer, step});
    return messages;
  }
  // Both ends go through a parcel's segments in the same order.
  for (size_t p = 0; p < parcels.size(); ++p)
    for (const PlacedSegment& placed : placement)
      if (placed.parcel == p)
        for (int half = 0; half < 2; ++half) messages.push_back({parcels[p].peer, tokens_of(step, half, placed)});
  return messages;
}

// Brings the keys and values of step after step to this rank.
class KeyTravel {
 public:
  KeyTravel(const AttentionCall& call, const KeySchedule& schedule, std::string_view pass)
      : call_(call),
        schedule_(schedule),
        pass_(pass),
        sent_(call, schedule, "attention.sent_key_value", call.dtype(), 1),
        received_(call, schedule, "attention.received_key_value", call.dtype(), schedule.sizes.buffers()) {}

  // Packs and sends what step i wants of this rank; step i - 1 has arrived.
  void start(size_t i) {
    if (i >= schedule_.steps.size()) return;
    const ExchangeStep& step = schedule_.steps[i];
    const Placement placement = place(step.sends, Order::parcels);
    const Tensor sent = sent_.of_step(i, tokens_of(placement), step.heads);
    for (const PlacedSegment& placed : placement) {
      cast(call_.device, own_part(call_.key, placed.segment, step.heads), tokens_of(sent, 0, placed));
      cast(call_.device, own_part(call_.value, placed.segment, step.heads), tokens_of(sent, 1, placed));
    }
    const Placement visitors = place(step.receives, Order::positions);
    arrival_ = call_.cp->exchange(messages(schedule_, step.sends, placement, sent),
                                  messages(schedule_, step.receives, visitors, received(i, visitors)),
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

  // What step i brought, as placed by positions.
  Tensor received(size_t i, const Placement& placement) const {
    return received_.of_step(i, tokens_of(placement), schedule_.steps[i].heads);
  }

 private:
  const AttentionCall& call_;
  const KeySchedule& schedule_;
  std::string_view pass_;
  StepBuffers sent_;
  StepBuffers received_;
  Work arrival_;
};

// Calls body(key block, its tokens among the step's) for all that step i brought, row by row.
template <typename Body>
void for_each_received(const KeySchedule& schedule, const KeyTravel& travel, size_t i, Body&& body) {
  const Placement placement = place(schedule.steps[i].receives, Order::positions);
  const Tensor received = travel.received(i, placement);
  for (size_t first = 0; first < placement.size();) {
    std::vector<Segment> segments;
    Span tokens{placement[first].begin, placement[first].begin};
    for (; first < placement.size(); ++first) {
      const Segment& next = placement[first].segment;
      if (!segments.empty() && next.row != segments.back().row) break;
      tokens.end += next.tokens();
      Span* const last = segments.empty() ? nullptr : &segments.back().keys.positions;
      if (last != nullptr && last->end == next.keys.positions.begin)
        last->end = next.keys.positions.end;
      else
        segments.push_back(next);
    }
    body(KeyBlock{segments, schedule.steps[i].heads, tokens_of(received, 0, tokens), tokens_of(received, 1, tokens)},
         tokens);
  }
}

// Brings gradients of visited keys back to their owners, who add them to their own.
class GradientTravel {
 public:
  GradientTravel(const AttentionCall& call, const KeySchedule& schedule, const Tensor& d_key, const Tensor& d_value)
      : call_(call),
        schedule_(schedule),
        d_key_(d_key),
        d_value_(d_value),
        computed_(call, schedule, "attention.visitor_d_key_value", DType::f32, schedule.sizes.buffers()),
        received_(call, schedule, "attention.received_d_key_value", DType::f32, 1) {}

  // Where the gradients of what step i brought are to be written, as that is placed.
  Tensor computed(size_t i) const { return computed(i, place(schedule_.steps[i].receives, Order::positions)); }

  // Sends home what step i added up, once the step before it has been taken in.
  void send(size_t i) {
    take_in();
    const ExchangeStep& step = schedule_.steps[i];
    const Placement visitors = place(step.receives, Order::positions), own = place(step.sends, Order::parcels);
    arrival_ = call_.cp->exchange(messages(schedule_, step.receives, visitors, computed(i, visitors)),
                                  messages(schedule_, step.sends, own, received(i, own)),
                                  fmt::format("attention backward d_key/d_value {}", step.name));
    under_way_ = i;
    if (!schedule_.sizes.overlap) take_in();
  }

  // Waits for what is under way and adds it.
  void take_in() {
    if (!under_way_) return;
    arrival_.wait();
    const ExchangeStep& step = schedule_.steps[*under_way_];
    const Placement own = place(step.sends, Order::parcels);
    const Tensor gradients = received(*under_way_, own);
    for (const PlacedSegment& placed : own) {
      const Tensor d_key = own_part(d_key_, placed.segment, step.heads);
      const Tensor d_value = own_part(d_value_, placed.segment, step.heads);
      add(call_.device, d_key, tokens_of(gradients, 0, placed), d_key);
      add(call_.device, d_value, tokens_of(gradients, 1, placed), d_value);
    }
    under_way_.reset();
  }

 private:
  Tensor computed(size_t i, const Placement& placement) const {
    return computed_.of_step(i, tokens_of(placement), schedule_.steps[i].heads);
  }
  Tensor received(size_t i, const Placement& placement) const {
    return received_.of_step(i, tokens_of(placement), schedule_.steps[i].heads);
  }

  const AttentionCall& call_;
  const KeySchedule& schedule_;
  Tensor d_key_;
  Tensor d_value_;
  StepBuffers computed_;
  StepBuffers received_;
  Work arrival_;
  std::optional<size_t> under_way_;
};

// Backward with d_key, d_value (B, s, K, D) in fp32, or in their own type where they are written once. `gradient` is a
// copy, in which delta comes into being.
void run_backward_into(const AttentionCall& call, const KeySchedule& schedule, OutputGradient gradient,
                       const Tensor& d_key, const Tensor& d_value) {
  MetQueries met(call);
  finish_blind_queries(call, gradient.d_query);
  if (call.ranks() == 1) return attend_own_backward(call, met, gradient, d_key, d_value);

  KeyTravel travel(call, schedule, "backward");
  GradientTravel home(call, schedule, d_key, d_value);
  travel.begin();
  attend_own_backward(call, met, gradient, d_key, d_value);
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    travel.arrive(i);
    const Tensor sums = home.computed(i);
    for_each_received(schedule, travel, i, [&](const KeyBlock& keys, Span tokens) {
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
  KeyTravel travel(call, schedule, "forward");
  travel.begin();
  attend_own_forward(call, met, out, lse);
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    travel.arrive(i);
    for_each_received(schedule, travel, i,
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
