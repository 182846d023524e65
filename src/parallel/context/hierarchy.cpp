// SPDX-License-Identifier: Apache-2.0
#include "parallel/context/hierarchy.h"

#include "base/error.h"
#include "config/head_split.h"

namespace farspan {
namespace {

std::string listed(const std::vector<int64_t>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size(); ++i)
    text += fmt::format("{}{}", i == 0 ? "" : i + 1 == numbers.size() ? " or " : ", ", numbers[i]);
  return text;
}

}  // namespace

std::optional<std::string> refuse_a2a(int64_t heads, int64_t kv_heads, int64_t degree, int64_t tp) {
  const int64_t local_heads = heads / tp;
  const int64_t kv = local_kv_heads(kv_heads, tp);
  if (heads % tp == 0 && splits_heads(local_heads, kv, degree)) return std::nullopt;
  const std::string cut =
      tp == 1 ? fmt::format("{} ranks", degree)
              : fmt::format("{} * {} = {} ranks (tensor-parallel size * a2a degree)", tp, degree, tp * degree);
  const std::string works = heads % tp == 0
                                ? fmt::format("an a2a degree that works here: {}", listed(a2a_degrees(local_heads, kv)))
                                : fmt::format("{} heads do not divide by the tensor-parallel size {}", heads, tp);
  return fmt::format("cp_comm_type a2a: {} query heads and {} key/value heads do not divide over {}; {}", heads,
                     kv_heads, cut, works);
}

HierarchicalSizes hierarchical_sizes(std::span<const int64_t> given, int cp, int64_t heads, int64_t kv_heads,
                                     int64_t most_inner) {
  if (given.empty()) {
    int inner = 1;
    for (int size = 2; size <= cp && size <= most_inner; ++size) {
      const bool one_level = size == cp && inner > 1;
      if (cp % size == 0 && splits_heads(heads, kv_heads, size) && !one_level) inner = size;
    }
    return {inner, cp / inner};
  }
  if (given.size() != 2)
    throw ConfigError(fmt::format(
        "hierarchical_context_parallel_sizes: {} numbers found; give two, the ranks that trade heads and the groups of "
        "them, for example [{}, 1]",
        given.size(), cp));
  if (given[0] < 1 || given[1] < 1 || cp % given[0] != 0 || given[1] != cp / given[0])
    throw ConfigError(
        fmt::format("hierarchical_context_parallel_sizes: [{}, {}] found; their product must be "
                    "context_parallel_size, {}",
                    given[0], given[1], cp));
  if (const auto reason = refuse_a2a(heads, kv_heads, given[0])) throw ConfigError(*reason);
  return {static_cast<int>(given[0]), static_cast<int>(given[1])};
}

std::vector<std::vector<int>> inner_groups(HierarchicalSizes sizes) {
  std::vector<std::vector<int>> groups(static_cast<size_t>(sizes.outer));
  for (int rank = 0; rank < sizes.inner * sizes.outer; ++rank)
    groups[static_cast<size_t>(rank / sizes.inner)].push_back(rank);
  return groups;
}

std::vector<std::vector<int>> outer_groups(HierarchicalSizes sizes) {
  std::vector<std::vector<int>> groups(static_cast<size_t>(sizes.inner));
  for (int rank = 0; rank < sizes.inner * sizes.outer; ++rank)
    groups[static_cast<size_t>(rank % sizes.inner)].push_back(rank);
  return groups;
}

}  // namespace farspan
