// SPDX-License-Identifier: Apache-2.0
// The order in which the Hopper attention kernels go over keys. A producer and its consumers count for themselves, so
// they must come to the same. Plain numbers, checked in tests/unit/attention_key_tiles_test.cpp.
#pragma once

namespace farspan::cuda {

// The tiles of `step` keys that a tile of queries has to do with. A key outside [first_seen, last_seen) is seen by none
// of them, one inside [all_first, all_last) by all; where none sees any, last_seen is no larger than first_seen.
struct KeyTiles {
  int first, end, step;
  int all_first, all_last;

  constexpr KeyTiles(int first_seen, int last_seen, int all_first_seen, int all_last_seen, int keys)
      : first(first_seen / keys * keys),
        end(first < last_seen ? last_seen : first),
        step(keys),
        all_first(all_first_seen),
        all_last(all_last_seen) {}

  constexpr bool any() const { return first < end; }
  constexpr int last() const { return (end - 1) / step * step; }
  // Some query does not see some key of the tile from `key` on.
  constexpr bool masked(int key) const { return key < all_first || key + step > all_last; }
  constexpr bool any_masked() const { return any() && (masked(first) || masked(last())); }
};

// A place in a ring of stages, and the parity of the phase in which that stage is filled. A consumer waits for the
// stage's `full` with the parity, a producer for its `free` with the other one.
template <int kStages>
struct Ring {
  int stage = 0;
  int parity = 0;
  constexpr void advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

}  // namespace farspan::cuda
