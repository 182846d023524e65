// SPDX-License-Identifier: Apache-2.0
#include "base/nearest_name.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>
#include <vector>

namespace farspan {
namespace {

char folded(char c) {
  if (c == '-') return '_';
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

}  // namespace

int64_t edit_distance(std::string_view a, std::string_view b) {
  // Three rows of the table distance(i, j) = edits from a's first i letters to b's first j.
  std::vector<int64_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) above[j] = static_cast<int64_t>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = static_cast<int64_t>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const bool same = folded(a[i - 1]) == folded(b[j - 1]);
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (same ? 0 : 1)});
      const bool swapped =
          i > 1 && j > 1 && folded(a[i - 1]) == folded(b[j - 2]) && folded(a[i - 2]) == folded(b[j - 1]);
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    std::swap(before, above);
    std::swap(above, row);
  }
  return above[b.size()];
}

std::string nearest_name(std::string_view name, std::span<const std::string> known) {
  std::string_view nearest;
  int64_t least = 0;
  for (const std::string& candidate : known) {
    const int64_t distance = edit_distance(name, candidate);
    if (nearest.empty() || distance < least) {
      nearest = candidate;
      least = distance;
    }
  }
  const int64_t longer = static_cast<int64_t>(std::max(name.size(), nearest.size()));
  return 2 * least <= longer ? std::string(nearest) : std::string();
}

std::string did_you_mean(std::string_view name, std::span<const std::string> known) {
  const std::string nearest = nearest_name(name, known);
  return nearest.empty() ? std::string() : fmt::format("; did you mean {}?", nearest);
}

}  // namespace farspan
