// SPDX-License-Identifier: Apache-2.0
// farspan groups: which rank is in which group, as a map to read or as JSON; where the machines are known (from the
// launcher, or --ranks-per-host) which edges of the groups cross them, and with a model's configuration the bytes that
// each dimension moves in a step.
//
// An edge is a pair of neighbours in a group, the last and the first one included: a ring's links. Pipeline stages are
// a chain, which virtual stages close.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fmt/format.h>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "command.h"
#include "config/hosts.h"
#include "config/launch.h"
#include "config/poor_choices.h"
#include "config/validate.h"
#include "data/tokenizer.h"
#include "parallel/grid.h"
#include "plan/step_plan.h"

namespace farspan {
namespace {

constexpr std::array kAxes = {Dimension::tp, Dimension::cp, Dimension::dp, Dimension::pp};
constexpr std::array kListed = {Dimension::tp, Dimension::cp, Dimension::dp, Dimension::pp, Dimension::dp_cp};
constexpr size_t kMostEdgesShown = 8;

using Groups = std::vector<std::vector<int>>;
using Edge = std::pair<int, int>;

struct Edges {
  int64_t all = 0;
  std::vector<Edge> across_hosts;
};

// What the map shows of one dimension.
struct Row {
  Dimension dimension;
  Groups groups;
  Edges edges;
};

struct Map {
  Grid grid;
  std::string order;
  std::optional<HostMap> hosts;
  bool processes = false;                 // started by a launcher, each rank one
  std::optional<BytesByDimension> bytes;  // received in a step, all ranks together
  std::vector<Row> rows;
};

Edges edges_of(const Groups& groups, bool closed, const std::optional<HostMap>& hosts) {
  Edges edges;
  for (const std::vector<int>& group : groups) {
    const size_t count = group.size() > 2 && closed ? group.size() : group.size() - 1;
    edges.all += static_cast<int64_t>(count);
    for (size_t i = 0; hosts && i < count; ++i) {
      const Edge edge = {group[i], group[(i + 1) % group.size()]};
      if (hosts->host_of(edge.first) != hosts->host_of(edge.second)) edges.across_hosts.push_back(edge);
    }
  }
  return edges;
}

std::string list_of(const Groups& groups, const char* between) {
  std::string text;
  for (const std::vector<int>& group : groups)
    fmt::format_to(std::back_inserter(text), "{}[{}]", text.empty() ? "" : between, fmt::join(group, ","));
  return text;
}

// --- JSON. The form up to "groups" is relied upon; what is known besides follows it. ---

std::string json_of_hosts(const Map& map) {
  std::string text = ",\"hosts\":[";
  for (int64_t host = 0; host < map.hosts->hosts(); ++host) {
    fmt::format_to(std::back_inserter(text), "{}[", host ? "," : "");
    for (int64_t rank = map.hosts->first_rank(host); rank < map.hosts->end_rank(host); ++rank)
      fmt::format_to(std::back_inserter(text), "{}{}", rank > map.hosts->first_rank(host) ? "," : "", rank);
    text += "]";
  }
  text += "],\"edges\":{";
  for (const Row& row : map.rows) {
    fmt::format_to(std::back_inserter(text), "{}\"{}\":{{\"all\":{},\"across_hosts\":[",
                   &row == &map.rows.front() ? "" : ",", name_of(row.dimension), row.edges.all);
    for (const Edge& edge : row.edges.across_hosts)
      fmt::format_to(std::back_inserter(text), "{}[{},{}]", &edge == &row.edges.across_hosts.front() ? "" : ",",
                     edge.first, edge.second);
    text += "]}";
  }
  return text + "}";
}

std::string json_of(const Map& map) {
  const GridSizes& sizes = map.grid.sizes();
  std::string text =
      fmt::format("{{\"world_size\":{},\"sizes\":{{\"tp\":{},\"cp\":{},\"dp\":{},\"pp\":{}}},\"groups\":{{",
                  sizes.world(), sizes.tp, sizes.cp, sizes.dp, sizes.pp);
  for (const Row& row : map.rows) {
    text += fmt::format("{}\"{}\":[{}]", &row == &map.rows.front() ? "" : ",", name_of(row.dimension),
                        list_of(row.groups, ","));
  }
  text += "}";
  if (map.hosts) text += json_of_hosts(map);
  if (map.bytes) {
    const BytesByDimension& bytes = *map.bytes;
    text += ",\"bytes_per_step\":{";
    for (Dimension dimension : kListed)
      text += fmt::format("{}\"{}\":{}", dimension == kListed.front() ? "" : ",", name_of(dimension),
                          bytes[static_cast<size_t>(dimension)]);
    text += "}";
  }
  return text + "}\n";
}

// --- The map to read. ---

std::string ranks_text(int64_t first, int64_t end) {
  return end - first == 1 ? fmt::format("rank {}", first) : fmt::format("ranks {} to {}", first, end - 1);
}

std::string hosts_text(const Map& map) {
  if (!map.hosts && map.processes) return "hosts unknown: the launcher does not tell how many ranks each has\n";
  if (!map.hosts) return fmt::format("host 0 {}, threads of one process\n", ranks_text(0, map.grid.sizes().world()));
  std::string text;
  for (int64_t host = 0; host < map.hosts->hosts(); ++host)
    text += fmt::format("host {} {}\n", host, ranks_text(map.hosts->first_rank(host), map.hosts->end_rank(host)));
  return text;
}

// Per dimension what crosses machines and what moves.
std::string links_text(const Map& map) {
  if (!map.hosts && !map.bytes) return "";
  std::string text = fmt::format("\n{:<6}{:>8}{:>8}{:>8}{:>14}{:>20}\n", "", "groups", "ranks", "edges", "across hosts",
                                 "bytes a step");
  for (const Row& row : map.rows) {
    const std::string across = map.hosts ? fmt::format("{}", row.edges.across_hosts.size()) : "-";
    const std::string bytes = map.bytes ? fmt::format("{}", (*map.bytes)[static_cast<size_t>(row.dimension)]) : "-";
    text += fmt::format("{:<6}{:>8}{:>8}{:>8}{:>14}{:>20}", name_of(row.dimension), row.groups.size(),
                        row.groups[0].size(), row.edges.all, across, bytes);
    const size_t shown = std::min(row.edges.across_hosts.size(), kMostEdgesShown);
    for (size_t i = 0; i < shown; ++i)
      text +=
          fmt::format("{}{}-{}", i ? " " : "   ", row.edges.across_hosts[i].first, row.edges.across_hosts[i].second);
    text += row.edges.across_hosts.size() > shown ? " ...\n" : "\n";
  }
  return text;
}

std::string text_of(const Map& map) {
  const GridSizes& sizes = map.grid.sizes();
  std::string text = fmt::format("world {} = tp {} x cp {} x dp {} x pp {}, order {} (fastest first)\n", sizes.world(),
                                 sizes.tp, sizes.cp, sizes.dp, sizes.pp, map.order);
  for (const Row& row : map.rows) text += fmt::format("{:<6} {}\n", name_of(row.dimension), list_of(row.groups, " "));
  text += hosts_text(map) + links_text(map);

  const int last = sizes.world() - 1;
  const int width = static_cast<int>(std::max(fmt::formatted_size("{}", last), std::string_view("rank").size()));
  text += fmt::format("\n{:>{}}", "rank", width);
  for (Dimension axis : kAxes) text += fmt::format("  {:>4}", name_of(axis));
  text += "\n";
  for (int rank = 0; rank <= last; ++rank) {
    fmt::format_to(std::back_inserter(text), "{:>{}}", rank, width);
    for (Dimension axis : kAxes) fmt::format_to(std::back_inserter(text), "  {:>4}", map.grid.coordinate(rank, axis));
    text += "\n";
  }
  return text;
}

// --- What is known. ---

// Whether the file says anything of a model or of its data.
bool names_a_model(const Config& config) {
  return std::any_of(config.origins.begin(), config.origins.end(), [](const auto& origin) {
    return origin.second != "default" && (origin.first.starts_with("model.") || origin.first.starts_with("data."));
  });
}

ResolvedSizes resolve_model(Config& config, int world) {
  ResolvedSizes sizes = resolve(config, world);
  if (config.model.vocab_size > 0) return sizes;
  config.model.vocab_size = Tokenizer::from_name(config.data.tokenizer).vocab_size();
  return resolve(config, world);
}

const char* variable(const char* name) { return std::getenv(name); }

std::optional<HostMap> hosts_of(const CommandLine& line, int world) {
  if (line.ranks_per_host > 0) return HostMap(world, line.ranks_per_host);
  const std::optional<HostMap> launched = hosts_of_launcher(variable);
  if (launched.has_value() && launched->world() == world) return *launched;
  return std::nullopt;  // no launcher, or a map of another world than its
}

}  // namespace

int run_groups(const CommandLine& line) {
  Config config = load_config(line);
  const int world = world_size(config, line.ranks);
  const bool model = names_a_model(config);
  const ResolvedSizes sizes = model ? resolve_model(config, world) : resolve(config, world, ResolveScope::grid);
  const ParallelConfig& parallel = config.parallel;
  Map map = {grid_of(config, sizes), parallel.rank_order,
             hosts_of(line, world),  read_launch(variable).processes > 1,
             std::nullopt,           {}};
  if (model) map.bytes = step_bytes(config, sizes);
  for (Dimension dimension : kListed) {
    Groups groups = map.grid.groups(dimension);
    const bool closed = dimension != Dimension::pp || parallel.num_layers_per_virtual_pipeline_stage > 0;
    const Edges edges = edges_of(groups, closed, map.hosts);
    map.rows.push_back({dimension, std::move(groups), edges});
  }
  print_warnings(sizes.warnings);
  if (map.hosts) print_warnings(poor_placement(parallel, sizes, *map.hosts));
  std::fputs((line.json ? json_of(map) : text_of(map)).c_str(), stdout);
  return 0;
}

}  // namespace farspan
