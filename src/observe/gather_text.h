// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "comm/communicator.h"

namespace farspan {

// Every rank's text, by rank, on the group's rank 0; nothing on the others. `group` moves host memory. Collective.
std::vector<std::string> gather_text(Communicator& group, std::string text);

}  // namespace farspan
