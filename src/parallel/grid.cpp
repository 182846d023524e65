// SPDX-License-Identifier: Apache-2.0
#include "parallel/grid.h"

#include <algorithm>
#include <optional>
#include <string_view>

namespace farspan {
namespace {

constexpr std::array kAxes = {Dimension::tp, Dimension::cp, Dimension::dp, Dimension::pp};

int size_along(const GridSizes& sizes, Dimension axis) {
  switch (axis) {
    case Dimension::tp:
      return sizes.tp;
    case Dimension::cp:
      return sizes.cp;
    case Dimension::dp:
      return sizes.dp;
    case Dimension::pp:
      return sizes.pp;
    default:
      throw InternalError(fmt::format("{} is not an axis of the rank grid", name_of(axis)));
  }
}

// Whether the ranks of one group of `dimension` differ along `axis`.
bool varies(Dimension dimension, Dimension axis) {
  switch (dimension) {
    case Dimension::world:
      return true;
    case Dimension::dp_cp:
      return axis == Dimension::dp || axis == Dimension::cp;
    default:
      return axis == dimension;
  }
}

std::optional<std::vector<Dimension>> parse_order(std::string_view order) {
  std::vector<Dimension> axes;
  while (true) {
    const size_t dash = order.find('-');
    const std::string_view name = order.substr(0, dash);
    const auto axis = std::find_if(kAxes.begin(), kAxes.end(), [&](Dimension a) { return name_of(a) == name; });
    if (axis == kAxes.end() || std::find(axes.begin(), axes.end(), *axis) != axes.end()) return std::nullopt;
    axes.push_back(*axis);
    if (dash == std::string_view::npos) break;
    order.remove_prefix(dash + 1);
  }
  if (axes.size() != kAxes.size()) return std::nullopt;
  return axes;
}

}  // namespace

Grid::Grid(GridSizes sizes, const std::string& order) : sizes_(sizes) {
  int64_t world = 1;
  for (Dimension axis : kAxes) {
    const int size = size_along(sizes, axis);
    if (size < 1) throw ConfigError(fmt::format("{} size {} of the rank grid: at least 1", name_of(axis), size));
    world *= size;
    if (world > INT32_MAX)
      throw ConfigError(fmt::format("rank grid tp {} x cp {} x dp {} x pp {}: at most {} ranks in all", sizes.tp,
                                    sizes.cp, sizes.dp, sizes.pp, INT32_MAX));
  }
  std::optional<std::vector<Dimension>> axes = parse_order(order);
  if (!axes)
    throw ConfigError(fmt::format(
        "rank_order \"{}\": name tp, cp, dp and pp once each, joined by dashes, as in \"tp-cp-dp-pp\"", order));
  order_ = std::move(*axes);
}

std::vector<std::vector<int>> Grid::groups(Dimension dimension) const {
  std::vector<std::vector<int>> groups;
  for (int rank = 0; rank < sizes_.world(); ++rank)
    if (first_of_group(rank, dimension) == rank) groups.push_back(group_of(rank, dimension));
  return groups;
}

// The members of a group differ along the dimension's axes only, so with those coordinates set to 0 they are all the
// same rank: the group's first.
int Grid::first_of_group(int rank, Dimension dimension) const {
  int first = rank;
  int stride = 1;
  for (Dimension axis : order_) {
    const int size = size_along(sizes_, axis);
    if (varies(dimension, axis)) first -= rank / stride % size * stride;
    stride *= size;
  }
  return first;
}

std::vector<int> Grid::group_of(int rank, Dimension dimension) const {
  FARSPAN_CHECK(rank >= 0 && rank < sizes_.world(), "there is no rank {} in a grid of {}", rank, sizes_.world());
  std::vector<int> group = {first_of_group(rank, dimension)};
  int stride = 1;
  // An axis repeats what there is so far at each of its coordinates; slower axes come later, so the ranks stay sorted.
  for (Dimension axis : order_) {
    const int size = size_along(sizes_, axis);
    const size_t so_far = group.size();
    for (int i = 1; varies(dimension, axis) && i < size; ++i)
      for (size_t member = 0; member < so_far; ++member) group.push_back(group[member] + i * stride);
    stride *= size;
  }
  return group;
}

std::pair<int, int> Grid::ends_of_group(int rank, Dimension dimension) const {
  FARSPAN_CHECK(rank >= 0 && rank < sizes_.world(), "there is no rank {} in a grid of {}", rank, sizes_.world());
  const int first = first_of_group(rank, dimension);
  int last = first;
  int stride = 1;
  for (Dimension axis : order_) {
    const int size = size_along(sizes_, axis);
    if (varies(dimension, axis)) last += (size - 1) * stride;
    stride *= size;
  }
  return {first, last};
}

int Grid::coordinate(int rank, Dimension axis) const {
  FARSPAN_CHECK(rank >= 0 && rank < sizes_.world(), "there is no rank {} in a grid of {}", rank, sizes_.world());
  const int size = size_along(sizes_, axis);
  int stride = 1;
  for (Dimension faster : order_) {
    if (faster == axis) break;
    stride *= size_along(sizes_, faster);
  }
  return rank / stride % size;
}

}  // namespace farspan
