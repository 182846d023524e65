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
#include <array>
#include <optional>

#include "ops/elementwise.h"
#include "parallel/context/key_schedule.h"

namespace farspan {
namespace {

// Some equal buffers that hold one step's parcels each, and take turns from step to step.
class ParcelBuffers {
 public:
  ParcelBuffers(const AttentionCall& call, const KeySchedule& schedule, std::string_view name, DType dtype, int count)
      : head_dim_(call.shape.head_dim), count_(static_cast<size_t>(count)) {
    for (size_t i = 0; i < count_; ++i)
      buffers_[i] = call.arena.take(name, dtype, {2 * schedule.sizes.capacity * head_dim_}, Purpose::communication);
  }

  // The parcels of step `turn`, one behind the other, each (2, tokens, heads, D): keys, then values (or their
  // gradients).
  std::vector<Tensor> parcels(size_t turn, const std::vector<Parcel>& parcels, Span heads) const {
    const Tensor& buffer = buffers_[turn % count_].tensor();
    std::vector<Tensor> tensors;
    int64_t begin = 0;
    for (const Parcel& parcel : parcels) {
      const int64_t end = begin + 2 * parcel.tokens * heads.length() * head_dim_;
      tensors.push_back(buffer.slice(0, begin, end).reshape({2, parcel.tokens, heads.length(), head_dim_}));
      begin = end;
    }
    return tensors;
  }

 private:
  int64_t head_dim_;
  size_t count_;
  std::array<Buffer, 2> buffers_;
};

// Tokens of one segment within its parcel: body(segment, tokens [begin, end) of the parcel).
template <typename Body>
void for_each_segment(const Parcel& parcel, Body&& body) {
  int64_t begin = 0;
  for (const Segment& segment : parcel.segments) {
    body(segment, Span{begin, begin + segment.tokens()});
    begin += segment.tokens();
  }
}

Tensor tokens_of(const Tensor& parcel, int half, Span tokens) {
  return entry(parcel, half).slice(0, tokens.begin, tokens.end);
}

// The owner's tensor at a segment, some heads of it: (B, s, K, D) -> (tokens, heads, D).
Tensor own_part(const Tensor& x, const Segment& segment, Span heads) {
  const int64_t begin = segment.keys.local_begin;
  return entry(x, segment.row).slice(0, begin, begin + segment.tokens()).slice(1, heads.begin, heads.end);
}

std::vector<Message> messages(const std::vector<Parcel>& parcels, const std::vector<Tensor>& tensors) {
  std::vector<Message> messages;
  for (size_t i = 0; i < parcels.size(); ++i) messages.push_back({parcels[i].peer, tensors[i]});
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
    const std::vector<Tensor> sent = sent_.parcels(i, step.sends, step.heads);
    for (size_t p = 0; p < sent.size(); ++p)
      for_each_segment(step.sends[p], [&](const Segment& segment, Span tokens) {
        cast(call_.device, own_part(call_.key, segment, step.heads), tokens_of(sent[p], 0, tokens));
        cast(call_.device, own_part(call_.value, segment, step.heads), tokens_of(sent[p], 1, tokens));
      });
    arrival_ = call_.cp->exchange(messages(step.sends, sent), messages(step.receives, received(i)),
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

  // What step i brought, by parcel.
  std::vector<Tensor> received(size_t i) const {
    const ExchangeStep& step = schedule_.steps[i];
    return received_.parcels(i, step.receives, step.heads);
  }

 private:
  const AttentionCall& call_;
  const KeySchedule& schedule_;
  std::string_view pass_;
  ParcelBuffers sent_;
  ParcelBuffers received_;
  Work arrival_;
};

// Calls body(parcel number, key block, tokens within the parcel) for all that step i brought, row by row.
template <typename Body>
void for_each_received(const KeySchedule& schedule, const KeyTravel& travel, size_t i, Body&& body) {
  const ExchangeStep& step = schedule.steps[i];
  const std::vector<Tensor> parcels = travel.received(i);
  for (size_t p = 0; p < parcels.size(); ++p) {
    std::span<const Segment> left = step.receives[p].segments;
    int64_t begin = 0;
    while (!left.empty()) {
      size_t count = 0;
      int64_t end = begin;
      for (; count < left.size() && left[count].row == left[0].row; ++count) end += left[count].tokens();
      body(p,
           KeyBlock{left.first(count), step.heads, tokens_of(parcels[p], 0, {begin, end}),
                    tokens_of(parcels[p], 1, {begin, end})},
           Span{begin, end});
      left = left.subspan(count);
      begin = end;
    }
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

  // Where the gradients of what step i brought are to be written, by received parcel.
  std::vector<Tensor> computed(size_t i) const {
    return computed_.parcels(i, schedule_.steps[i].receives, schedule_.steps[i].heads);
  }

  // Sends home what step i added up, once the step before it has been taken in.
  void send(size_t i) {
    take_in();
    const ExchangeStep& step = schedule_.steps[i];
    arrival_ = call_.cp->exchange(messages(step.receives, computed(i)), messages(step.sends, received(i)),
                                  fmt::format("attention backward d_key/d_value {}", step.name));
    under_way_ = i;
    if (!schedule_.sizes.overlap) take_in();
  }

  // Waits for what is under way and adds it.
  void take_in() {
    if (!under_way_) return;
    arrival_.wait();
    const ExchangeStep& step = schedule_.steps[*under_way_];
    const std::vector<Tensor> parcels = received(*under_way_);
    for (size_t p = 0; p < parcels.size(); ++p)
      for_each_segment(step.sends[p], [&](const Segment& segment, Span tokens) {
        const Tensor d_key = own_part(d_key_, segment, step.heads);
        const Tensor d_value = own_part(d_value_, segment, step.heads);
        add(call_.device, d_key, tokens_of(parcels[p], 0, tokens), d_key);
        add(call_.device, d_value, tokens_of(parcels[p], 1, tokens), d_value);
      });
    under_way_.reset();
  }

 private:
  std::vector<Tensor> received(size_t i) const {
    return received_.parcels(i, schedule_.steps[i].sends, schedule_.steps[i].heads);
  }

  const AttentionCall& call_;
  const KeySchedule& schedule_;
  Tensor d_key_;
  Tensor d_value_;
  ParcelBuffers computed_;
  ParcelBuffers received_;
  Work arrival_;
  std::optional<size_t> under_way_;
};

// Backward with d_key, d_value (B, s, K, D) in fp32, or in their own type where they are written once.
void run_backward_into(const AttentionCall& call, const KeySchedule& schedule, const OutputGradient& gradient,
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
    const std::vector<Tensor> sums = home.computed(i);
    for_each_received(schedule, travel, i, [&](size_t parcel, const KeyBlock& keys, Span tokens) {
      attend_backward(call, met, gradient, keys, tokens_of(sums[parcel], 0, tokens),
                      tokens_of(sums[parcel], 1, tokens));
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
                      [&](size_t, const KeyBlock& keys, Span) { attend_forward(call, met, keys, out, lse); });
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
