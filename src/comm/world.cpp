// SPDX-License-Identifier: Apache-2.0
#include "comm/world.h"

#include <algorithm>
#include <set>

namespace farspan {

int World::gpu_of_place(int place) {
  const int count = cuda_device_count();
  if (count == 0) throw ConfigError("device cuda: " + cuda_absence() + "; use device cpu");
  return place % count;
}

int World::place_in_group(int world_rank, const std::vector<int>& ranks, Dimension dimension) const {
  const std::string name = group_name(dimension, ranks);
  const auto place = std::find(ranks.begin(), ranks.end(), world_rank);
  FARSPAN_CHECK(place != ranks.end(), "{} does not hold rank {}", name, world_rank);
  FARSPAN_CHECK(std::set<int>(ranks.begin(), ranks.end()).size() == ranks.size(), "{} holds a rank twice", name);
  for (int rank : ranks)
    FARSPAN_CHECK(rank >= 0 && rank < size(), "{}: there is no rank {} in a world of {}", name, rank, size());
  return static_cast<int>(place - ranks.begin());
}

}  // namespace farspan
