// SPDX-License-Identifier: Apache-2.0
#include "parallel/rank_context.h"

namespace farspan {

void make_groups(RankContext& context, const GroupMaker& make) {
  for (int i = 0; i < kDimensions; ++i) {
    const Dimension dimension = static_cast<Dimension>(i);
    context.groups[static_cast<size_t>(i)] = make(context.grid->group_of(context.rank, dimension), dimension);
  }
}

}  // namespace farspan
