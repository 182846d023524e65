// SPDX-License-Identifier: Apache-2.0
// Which known name a misspelt one was meant to be, for "did you mean".
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace farspan {

// Insertions, deletions, substitutions and swaps of neighbours that turn a into b (optimal string alignment: no
// substring is edited twice). '-' and '_' count as the same letter, and so do upper and lower case. Source: Damerau, "A
// technique for computer detection and correction of spelling errors", CACM 7(3), 1964.
int64_t edit_distance(std::string_view a, std::string_view b);

// The known name with the least edit distance, the first such in order; empty when even that one differs from `name` in
// more than half of the longer one's letters, so that a suggestion is never a guess at random.
std::string nearest_name(std::string_view name, std::span<const std::string> known);

// "; did you mean NAME?", or an empty string when nothing is near. For the end of an error message.
std::string did_you_mean(std::string_view name, std::span<const std::string> known);

}  // namespace farspan
