// SPDX-License-Identifier: Apache-2.0
// From lifetimes to offsets. Resident buffers lie at the bottom, one after the other. A program's buffers are placed
// above, largest first, each at the lowest offset where it meets no buffer alive at the same time. Finding the least
// height is NP-hard (dynamic storage allocation); largest first stays within a few percent of the live-byte bound on
// the programs here, and tests hold it to that.
#include <algorithm>
#include <numeric>

#include "base/math.h"
#include "memory/arena.h"

namespace farspan {
namespace {

struct Lifetime {
  size_t begin = 0;  // event that takes
  size_t end = 0;    // event that releases
};

int64_t sum(const BytesByPurpose& bytes) { return std::accumulate(bytes.begin(), bytes.end(), int64_t{0}); }

std::vector<Lifetime> lifetimes(const PlannedProgram& program) {
  std::vector<Lifetime> lives(program.buffers.size());
  for (size_t i = 0; i < program.events.size(); ++i) {
    const ArenaEvent event = program.events[i];
    Lifetime& life = lives[static_cast<size_t>(event.buffer)];
    (event.release ? life.end : life.begin) = i;
  }
  return lives;
}

void place(PlannedProgram& program, int64_t bottom) {
  const std::vector<Lifetime> lives = lifetimes(program);
  std::vector<size_t> order(program.buffers.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return program.buffers[a].bytes > program.buffers[b].bytes; });
  std::vector<size_t> placed;  // ascending by offset
  program.end = bottom;
  for (size_t index : order) {
    PlannedBuffer& buffer = program.buffers[index];
    const Lifetime life = lives[index];
    int64_t offset = bottom;
    for (size_t other : placed) {
      if (lives[other].end <= life.begin || life.end <= lives[other].begin) continue;
      if (program.buffers[other].offset >= offset + buffer.bytes) break;
      offset =
          std::max(offset, round_up(program.buffers[other].offset + program.buffers[other].bytes, kArenaAlignment));
    }
    buffer.offset = offset;
    program.end = std::max(program.end, offset + buffer.bytes);
    const auto after = std::upper_bound(placed.begin(), placed.end(), offset,
                                        [&](int64_t o, size_t other) { return o < program.buffers[other].offset; });
    placed.insert(after, index);
  }
}

}  // namespace

void lay_out(MemoryPlan& plan) {
  int64_t bottom = 0;
  BytesByPurpose resident{};
  for (PlannedBuffer& buffer : plan.resident) {
    buffer.offset = bottom;
    bottom = round_up(bottom + buffer.bytes, kArenaAlignment);
    resident[static_cast<size_t>(buffer.purpose)] += buffer.bytes;
  }
  plan.peak_bytes = plan.resident.empty() ? 0 : plan.resident.back().offset + plan.resident.back().bytes;
  plan.by_purpose = resident;
  plan.largest_by_purpose = resident;
  plan.peak_program = "resident";
  for (PlannedProgram& program : plan.programs) {
    place(program, bottom);
    BytesByPurpose live = resident;
    BytesByPurpose at_peak = resident;
    for (const ArenaEvent event : program.events) {
      const PlannedBuffer& buffer = program.buffers[static_cast<size_t>(event.buffer)];
      const size_t purpose = static_cast<size_t>(buffer.purpose);
      live[purpose] += event.release ? -buffer.bytes : buffer.bytes;
      plan.largest_by_purpose[purpose] = std::max(plan.largest_by_purpose[purpose], live[purpose]);
      if (sum(live) > sum(at_peak)) at_peak = live;
    }
    program.live_peak = sum(at_peak);
    if (program.end > plan.peak_bytes) {
      plan.peak_bytes = program.end;
      plan.by_purpose = at_peak;
      plan.peak_program = program.name;
    }
  }
  if (plan.scratch_bytes > 0) plan.peak_bytes = round_up(plan.peak_bytes, kArenaAlignment) + plan.scratch_bytes;
  plan.by_purpose[static_cast<size_t>(Purpose::workspace)] += plan.peak_bytes - sum(plan.by_purpose);
}

}  // namespace farspan
