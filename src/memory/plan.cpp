// SPDX-License-Identifier: Apache-2.0
// From lifetimes to offsets. Resident buffers lie at the bottom, one after the other. A program's buffers are placed
// above, largest first, each at the lowest offset where it meets no buffer alive at the same time. Finding the least
// height is NP-hard (dynamic storage allocation). Where this ends more than a little above the live-byte bound, which
// no layout can beat, two more are made around a stack: what is alive when the last buffer is taken lies below the
// bound, the first taken highest, so that gradients grow down as the activations kept for them go; of the rest the
// longest-lived comes first, or the largest. The lowest of the three stays within a few percent of the bound on the
// programs here, and tests hold it to that.
#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

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

// The buffers at one offset, which are never alive at the same time.
struct Shelf {
  struct Use {
    Lifetime life;
    int64_t bytes = 0;
  };
  int64_t offset = 0;
  std::vector<Use> uses;  // ascending in time
  size_t longest = 0;     // the use that lives longest
  int64_t bytes = 0;      // of the largest use

  int64_t top(int64_t used) const { return round_up(offset + used, kArenaAlignment); }

  // Bytes of the largest use that meets the life; 0: none does.
  int64_t bytes_met(Lifetime life) const {
    int64_t met = 0;
    auto use = std::partition_point(uses.begin(), uses.end(), [&](const Use& u) { return u.life.end <= life.begin; });
    for (; use != uses.end() && use->life.begin < life.end && met < bytes; ++use) met = std::max(met, use->bytes);
    return met;
  }

  void add(Use use) {
    const auto after = std::upper_bound(uses.begin(), uses.end(), use.life.begin,
                                        [](size_t begin, const Use& u) { return begin < u.life.begin; });
    const size_t at = static_cast<size_t>(after - uses.begin());
    if (!uses.empty() && at <= longest) ++longest;
    uses.insert(after, use);
    if (use.life.end - use.life.begin > uses[longest].life.end - uses[longest].life.begin) longest = at;
    bytes = std::max(bytes, use.bytes);
  }
};

// Neighbouring shelves, and what lets a search pass them all at once: thousands of layers' kept activations are
// thousands of shelves, of which a buffer meets all or none but for the few around its own layer.
struct ShelfBlock {
  static constexpr size_t kMostShelves = 64;

  std::vector<Shelf> shelves;  // ascending by offset
  Lifetime any;                // meets no life outside of this,
  Lifetime all;                // and on each shelf the largest use where a life meets both ends of this:
  int64_t gap = 0;             // between those uses there is no more room than this
  int64_t top = 0;             // nor below this

  void summarise() {
    any = {std::numeric_limits<size_t>::max(), 0};
    all = {0, std::numeric_limits<size_t>::max()};
    gap = top = 0;
    for (const Shelf& shelf : shelves) {
      any.begin = std::min(any.begin, shelf.uses.front().life.begin);
      any.end = std::max(any.end, shelf.uses.back().life.end);
      const Shelf::Use& longest = shelf.uses[shelf.longest];
      all.begin = std::max(all.begin, longest.life.begin);
      all.end = longest.bytes == shelf.bytes ? std::min(all.end, longest.life.end) : 0;
      if (&shelf != &shelves.front()) gap = std::max(gap, shelf.offset - top);
      top = std::max(top, shelf.top(shelf.bytes));
    }
  }
  bool meets_none(Lifetime life) const { return any.end <= life.begin || life.end <= any.begin; }
  bool meets_all(Lifetime life) const { return all.begin < life.end && life.begin < all.end; }
};

// All shelves above the resident buffers, in blocks.
class Shelves {
 public:
  // The lowest offset from `bottom` on at which so many bytes meet nothing that is alive in `life`.
  int64_t lowest_offset(int64_t bottom, int64_t bytes, Lifetime life) const {
    int64_t offset = bottom;
    for (const ShelfBlock& block : blocks_) {
      if (block.shelves.front().offset >= offset + bytes) break;
      if (block.meets_none(life)) continue;
      if (block.meets_all(life) && block.gap < bytes) {
        offset = std::max(offset, block.top);
        continue;
      }
      for (const Shelf& shelf : block.shelves) {
        if (shelf.offset >= offset + bytes) return offset;
        const int64_t met = shelf.bytes_met(life);
        if (met > 0) offset = std::max(offset, shelf.top(met));
      }
    }
    return offset;
  }

  void add(int64_t offset, int64_t bytes, Lifetime life) {
    if (blocks_.empty()) blocks_.emplace_back();
    auto block = std::upper_bound(blocks_.begin() + 1, blocks_.end(), offset,
                                  [](int64_t o, const ShelfBlock& b) { return o < b.shelves.front().offset; });
    --block;
    std::vector<Shelf>& shelves = block->shelves;
    auto shelf =
        std::partition_point(shelves.begin(), shelves.end(), [&](const Shelf& s) { return s.offset < offset; });
    if (shelf == shelves.end() || shelf->offset != offset) {
      shelf = shelves.emplace(shelf);
      shelf->offset = offset;
    }
    shelf->add({life, bytes});
    if (shelves.size() > ShelfBlock::kMostShelves) {
      const auto half = shelves.begin() + ShelfBlock::kMostShelves / 2;
      ShelfBlock upper;
      upper.shelves.assign(std::make_move_iterator(half), std::make_move_iterator(shelves.end()));
      upper.summarise();
      shelves.erase(half, shelves.end());
      block = blocks_.insert(block + 1, std::move(upper)) - 1;
    }
    block->summarise();
  }

 private:
  std::vector<ShelfBlock> blocks_;  // ascending by offset
};

constexpr int64_t kUnplaced = -1;
constexpr int64_t kLittle = 1000;  // another layout costs a plan of thousands of ranks seconds

struct Layout {
  std::vector<int64_t> offsets;
  int64_t end = 0;
};

using Order = std::function<bool(size_t, size_t)>;

// `layout`, and around it in this order what it does not place.
Layout fill_in(const PlannedProgram& program, const std::vector<Lifetime>& lives, int64_t bottom, const Order& before,
               Layout layout) {
  std::vector<size_t> order(lives.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto unplaced = std::stable_partition(order.begin(), order.end(),
                                              [&](size_t index) { return layout.offsets[index] != kUnplaced; });
  std::stable_sort(unplaced, order.end(), before);
  Shelves shelves;
  for (size_t index : order) {
    const int64_t bytes = program.buffers[index].bytes;
    int64_t& offset = layout.offsets[index];
    if (offset == kUnplaced) offset = shelves.lowest_offset(bottom, bytes, lives[index]);
    if (bytes > 0) shelves.add(offset, bytes, lives[index]);
    layout.end = std::max(layout.end, offset + bytes);
  }
  return layout;
}

// The most bytes alive at one time, each buffer with its padding.
int64_t padded_peak(const PlannedProgram& program) {
  int64_t live = 0;
  int64_t peak = 0;
  for (const ArenaEvent event : program.events) {
    const int64_t bytes = round_up(program.buffers[static_cast<size_t>(event.buffer)].bytes, kArenaAlignment);
    live += event.release ? -bytes : bytes;
    peak = std::max(peak, live);
  }
  return peak;
}

// What is alive when the last buffer is taken, from `top` down. Buffers are numbered as they are taken.
Layout stack_below(int64_t top, const PlannedProgram& program, const std::vector<Lifetime>& lives, Layout layout) {
  for (size_t index = 0; index < lives.size(); ++index) {
    if (lives[index].end < lives.back().begin) continue;
    top -= round_up(program.buffers[index].bytes, kArenaAlignment);
    layout.offsets[index] = top;
  }
  return layout;
}

void place(PlannedProgram& program, int64_t bottom) {
  const std::vector<Lifetime> lives = lifetimes(program);
  const auto bytes = [&](size_t index) { return program.buffers[index].bytes; };
  const auto length = [&](size_t index) { return lives[index].end - lives[index].begin; };
  const Order larger = [&](size_t a, size_t b) { return bytes(a) > bytes(b); };
  const Order longer = [&](size_t a, size_t b) {
    return length(a) != length(b) ? length(a) > length(b) : bytes(a) > bytes(b);
  };
  const Layout empty = {.offsets = std::vector<int64_t>(lives.size(), kUnplaced), .end = bottom};
  const int64_t bound = bottom + padded_peak(program);
  Layout best = fill_in(program, lives, bottom, larger, empty);
  for (const Order& order : {longer, larger}) {
    if (best.end <= bound + bound / kLittle) break;
    Layout layout = fill_in(program, lives, bottom, order, stack_below(bound, program, lives, empty));
    if (layout.end < best.end) best = std::move(layout);
  }
  for (size_t index = 0; index < lives.size(); ++index) program.buffers[index].offset = best.offsets[index];
  program.end = best.end;
}

bool same_buffers(const std::vector<PlannedBuffer>& a, const std::vector<PlannedBuffer>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const PlannedBuffer& x, const PlannedBuffer& y) {
    return x.bytes == y.bytes && x.purpose == y.purpose && x.name == y.name;
  });
}

bool same_program(const PlannedProgram& a, const PlannedProgram& b) {
  return a.events == b.events && a.name == b.name && same_buffers(a.buffers, b.buffers);
}

}  // namespace

bool same_recording(const MemoryPlan& a, const MemoryPlan& b) {
  return a.scratch_bytes == b.scratch_bytes && same_buffers(a.resident, b.resident) &&
         std::equal(a.programs.begin(), a.programs.end(), b.programs.begin(), b.programs.end(), same_program);
}

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
