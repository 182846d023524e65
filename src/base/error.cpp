// SPDX-License-Identifier: Apache-2.0
#include "base/error.h"

namespace farspan::detail {

void throw_check_failure(const char* expression, const char* file, int line, const std::string& message) {
  throw InternalError(fmt::format("{} [{} is false at {}:{}]", message, expression, file, line));
}

}  // namespace farspan::detail
