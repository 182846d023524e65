// SPDX-License-Identifier: Apache-2.0
#include "parallel/pipeline/layer_split.h"

#include <fmt/format.h>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/math.h"

namespace farspan {
namespace {

// Share `index` of `whole` things dealt to `parts`; the first ones get one more where it does not divide.
int64_t share(int64_t whole, int64_t parts, int64_t index) { return whole / parts + (index < whole % parts ? 1 : 0); }

std::string count_of(int64_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

[[noreturn]] void refuse_even_split(const LayerSplit& split) {
  std::string remedy = "use at least " + count_of(checked_mul(split.stages, split.chunks), "layer");
  if (split.layers >= split.chunks) remedy += ", at most " + count_of(split.layers / split.chunks, "stage");
  if (split.chunks > 1 && split.layers >= split.stages)
    remedy += ", at most " + count_of(split.layers / split.stages, "chunk") + " a stage";
  throw ConfigError(fmt::format("num_layers {} over {} of {} each leaves one of them without a layer; {}", split.layers,
                                count_of(split.stages, "pipeline stage"), count_of(split.chunks, "chunk"), remedy));
}

// Throws unless what is given for the first and the last stage leaves a layer for every virtual stage.
void check_given_layers(const LayerSplit& split) {
  const auto check_stage = [&](std::string_view key, int64_t layers) {
    if (layers > 0 && layers < split.chunks)
      throw ConfigError(fmt::format("{} {} leaves one of the stage's {} without a layer; use at least {}", key, layers,
                                    count_of(split.chunks, "chunk"), split.chunks));
    if (layers > 0 && split.stages == 1 && layers != split.layers)
      throw ConfigError(fmt::format("{} is {} of {} layers with a single stage; use {} or more stages", key, layers,
                                    split.layers, split.layers));
  };
  check_stage("decoder_first_pipeline_num_layers", split.first_layers);
  check_stage("decoder_last_pipeline_num_layers", split.last_layers);
  if (split.stages == 1) return;
  const int64_t given = split.first_layers + split.last_layers;
  const int64_t rest = split.layers - given;
  const int64_t others = split.stages - (split.first_layers > 0 ? 1 : 0) - (split.last_layers > 0 ? 1 : 0);
  if (rest < 0 || (others == 0 && rest > 0))
    throw ConfigError(fmt::format(
        "decoder_first_pipeline_num_layers {} and decoder_last_pipeline_num_layers {} add up to {} of {} layers; {}",
        split.first_layers, split.last_layers, given, split.layers,
        others == 0 ? "with two stages they must be all" : "use less, or leave one out"));
  if (rest < others * split.chunks)
    throw ConfigError(
        fmt::format("decoder_first_pipeline_num_layers {} and decoder_last_pipeline_num_layers {} leave "
                    "{} for the {} between, which need at least {}",
                    split.first_layers, split.last_layers, count_of(rest, "layer"), count_of(others, "stage"),
                    others * split.chunks));
}

// Layers of each stage.
std::vector<int64_t> stage_layers(const LayerSplit& split) {
  std::vector<int64_t> layers(static_cast<size_t>(split.stages));
  const bool first_given = split.first_layers > 0;
  const bool last_given = split.last_layers > 0 && split.stages > 1;
  const int64_t rest = split.layers - (first_given ? split.first_layers : 0) - (last_given ? split.last_layers : 0);
  const int others = split.stages - (first_given ? 1 : 0) - (last_given ? 1 : 0);
  int next = 0;
  for (int stage = 0; stage < split.stages; ++stage) {
    int64_t& own = layers[static_cast<size_t>(stage)];
    if (first_given && stage == 0)
      own = split.first_layers;
    else if (last_given && stage == split.stages - 1)
      own = split.last_layers;
    else
      own = share(rest, others, next++);
  }
  return layers;
}

}  // namespace

std::vector<Span> split_layers(const LayerSplit& split) {
  FARSPAN_CHECK(split.stages >= 1 && split.chunks >= 1, "layer split: {} stages of {} chunks", split.stages,
                split.chunks);
  if (split.layers < checked_mul(split.stages, split.chunks)) refuse_even_split(split);
  check_given_layers(split);
  const std::vector<int64_t> of_stage = stage_layers(split);
  std::vector<Span> spans;
  int64_t begin = 0;
  for (int chunk = 0; chunk < split.chunks; ++chunk)
    for (int64_t layers : of_stage) {
      const int64_t end = begin + share(layers, split.chunks, chunk);
      spans.push_back({begin, end});
      begin = end;
    }
  return spans;
}

}  // namespace farspan
