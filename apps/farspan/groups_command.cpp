// SPDX-License-Identifier: Apache-2.0
// farspan groups: which rank is in which group, as a map to read or as JSON. Any sizes are shown, also those that this
// version does not train with.
#include <algorithm>
#include <array>
#include <cstdio>
#include <fmt/format.h>
#include <string>
#include <vector>

#include "command.h"
#include "config/validate.h"
#include "parallel/grid.h"

namespace farspan {
namespace {

constexpr std::array kAxes = {Dimension::tp, Dimension::cp, Dimension::dp, Dimension::pp};
constexpr std::array kListed = {Dimension::tp, Dimension::cp, Dimension::dp, Dimension::pp, Dimension::dp_cp};

std::string list_of(const std::vector<std::vector<int>>& groups, const char* between) {
  std::vector<std::string> texts;
  for (const std::vector<int>& group : groups) texts.push_back(fmt::format("[{}]", fmt::join(group, ",")));
  return fmt::format("{}", fmt::join(texts, between));
}

std::string json_of(const Grid& grid) {
  const GridSizes& sizes = grid.sizes();
  std::string text =
      fmt::format("{{\"world_size\":{},\"sizes\":{{\"tp\":{},\"cp\":{},\"dp\":{},\"pp\":{}}},\"groups\":{{",
                  sizes.world(), sizes.tp, sizes.cp, sizes.dp, sizes.pp);
  for (Dimension dimension : kListed) {
    text += fmt::format("{}\"{}\":[{}]", dimension == kListed.front() ? "" : ",", name_of(dimension),
                        list_of(grid.groups(dimension), ","));
  }
  return text + "}}\n";
}

std::string map_of(const Grid& grid, const std::string& order) {
  const GridSizes& sizes = grid.sizes();
  std::string text = fmt::format("world {} = tp {} x cp {} x dp {} x pp {}, order {} (fastest first)\n", sizes.world(),
                                 sizes.tp, sizes.cp, sizes.dp, sizes.pp, order);
  for (Dimension dimension : kListed) {
    text += fmt::format("{:<6} {}\n", name_of(dimension), list_of(grid.groups(dimension), " "));
  }
  const int last = sizes.world() - 1;
  text += fmt::format("host 0 {}, threads of one process\n", last == 0 ? "rank 0" : fmt::format("ranks 0 to {}", last));

  const int width = static_cast<int>(std::max(fmt::formatted_size("{}", last), std::string_view("rank").size()));
  text += fmt::format("\n{:>{}}", "rank", width);
  for (Dimension axis : kAxes) text += fmt::format("  {:>4}", name_of(axis));
  text += "\n";
  for (int rank = 0; rank <= last; ++rank) {
    text += fmt::format("{:>{}}", rank, width);
    for (Dimension axis : kAxes) text += fmt::format("  {:>4}", grid.coordinate(rank, axis));
    text += "\n";
  }
  return text;
}

}  // namespace

int run_groups(const CommandLine& line) {
  Config config = load_config(line);
  const ResolvedSizes resolved = resolve(config, world_size(config, line.ranks), ResolveScope::grid);
  const ParallelConfig& parallel = config.parallel;
  GridSizes sizes;
  sizes.tp = static_cast<int>(parallel.tensor_model_parallel_size);
  sizes.cp = static_cast<int>(parallel.context_parallel_size);
  sizes.dp = static_cast<int>(resolved.data_parallel_size);
  sizes.pp = static_cast<int>(parallel.pipeline_model_parallel_size);
  const Grid grid(sizes, parallel.rank_order);
  const std::string text = line.json ? json_of(grid) : map_of(grid, parallel.rank_order);
  std::fputs(text.c_str(), stdout);
  return 0;
}

}  // namespace farspan
