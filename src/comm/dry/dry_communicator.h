// SPDX-License-Identifier: Apache-2.0
// A communicator that moves nothing: it checks sizes, counts bytes by the same formulas as the others, and completes at
// once. Plans are made with it, one rank at a time, for any world size.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace farspan {

// `rank` is within the group, `ranks` are the world ranks. Throws InternalError when the group has no such rank.
std::unique_ptr<Communicator> make_dry_communicator(Dimension dimension, int rank, std::vector<int> ranks);

}  // namespace farspan
