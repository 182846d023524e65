// SPDX-License-Identifier: Apache-2.0
#include "parallel/rank_context.h"

namespace farspan {

void make_groups(RankContext& context, GroupMaker make) {
  for (int i = 0; i < kDimensions; ++i) {
    const Dimension dimension = static_cast<Dimension>(i);
    context.groups[static_cast<size_t>(i)] = make(context.grid->group_of(context.rank, dimension), dimension);
  }
  context.make_group = std::move(make);
}

Communicator& RankContext::add_group(std::vector<int> ranks, Dimension dimension) {
  return *more_groups.emplace_back(make_group(std::move(ranks), dimension));
}

Traffic RankContext::traffic(Dimension dimension) const {
  Traffic sum = group(dimension).traffic();
  for (const auto& more : more_groups) {
    if (more->dimension() != dimension) continue;
    sum.bytes_sent += more->traffic().bytes_sent;
    sum.bytes_received += more->traffic().bytes_received;
    sum.calls += more->traffic().calls;
    sum.exposed_seconds += more->traffic().exposed_seconds;
  }
  return sum;
}

void RankContext::observe_ops(OpObserver* observer) {
  op_observer = observer;
  device->observe(observer);
}

void RankContext::observe_calls(CallObserver* observer) const {
  for (const auto& group : groups) group->observe(observer);
  for (const auto& more : more_groups) more->observe(observer);
}

void RankContext::reset_traffic() {
  for (const auto& group : groups) group->reset_traffic();
  for (const auto& more : more_groups) more->reset_traffic();
}

}  // namespace farspan
