// SPDX-License-Identifier: Apache-2.0
#include "comm/communicator.h"

namespace farspan {

std::string_view name_of(Dimension dimension) {
  switch (dimension) {
    case Dimension::tp:
      return "tp";
    case Dimension::cp:
      return "cp";
    case Dimension::dp:
      return "dp";
    case Dimension::pp:
      return "pp";
    case Dimension::dp_cp:
      return "dp_cp";
    case Dimension::world:
      return "world";
  }
  throw InternalError(fmt::format("no dimension has the number {}", static_cast<int>(dimension)));
}

std::string group_name(Dimension dimension, const std::vector<int>& ranks) {
  return fmt::format("{} group [{}]", name_of(dimension), fmt::join(ranks, ", "));
}

}  // namespace farspan
