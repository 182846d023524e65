// SPDX-License-Identifier: Apache-2.0
// Single JSON values as text (RFC 8259), for files that are written piece by piece.
#pragma once

#include <string>
#include <string_view>

namespace farspan {

// With quotes; control characters, quotes and backslashes escaped. Bytes that are not UTF-8 become U+FFFD, one each.
std::string json_string(std::string_view text);

// 17 significant digits, which bring the same double back; null for what JSON cannot say (NaN, infinities).
std::string json_number(double value);

}  // namespace farspan
