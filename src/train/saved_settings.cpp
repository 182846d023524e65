// SPDX-License-Identifier: Apache-2.0
#include "train/saved_settings.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "base/error.h"
#include "base/log.h"
#include "config/keys.h"

namespace farspan {
namespace {

// How weights are read changes with these, but training can adapt to a new value: context extension does.
constexpr std::array<std::string_view, 5> kAdaptable = {"model.rotary_base", "model.rope_scaling.", "model.window_size",
                                                        "model.softmax_scale", "model.norm_epsilon"};
// Only the start depends on these.
constexpr std::array<std::string_view, 2> kOnlyAtTheStart = {"model.preset", "model.init_method_std"};
// Where the run is in its data and what its moments mean.
constexpr std::array<std::string_view, 3> kPlaceInTheRun = {"training.seed", "training.global_batch_size",
                                                            "optimizer.optimizer"};
constexpr std::array<std::string_view, 3> kOther = {"training.precision", "data.reset_position_ids", "optimizer."};

template <size_t N>
bool among(const std::string& path, const std::array<std::string_view, N>& prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](std::string_view prefix) { return std::string_view(path).starts_with(prefix); });
}

bool is_saved(const std::string& path) {
  const bool model = path.starts_with("model.") && !among(path, kOnlyAtTheStart);
  return model || among(path, kPlaceInTheRun) || among(path, kOther);
}

bool may_differ(const std::string& path, LoadUse use) {
  if (path.starts_with("model.")) return use == LoadUse::weights && among(path, kAdaptable);
  return use != LoadUse::resume || !among(path, kPlaceInTheRun);
}

}  // namespace

SavedSettings settings_of(const Config& config) {
  SavedSettings settings;
  for (const Key& key : config_keys())
    if (is_saved(key.path())) settings[key.path()] = key.write(config);
  return settings;
}

void check_settings(const std::string& checkpoint, const SavedSettings& saved, const Config& config, LoadUse use) {
  for (const auto& [path, now] : settings_of(config)) {
    const auto before = saved.find(path);
    if (before == saved.end() || before->second == now) continue;
    if (!may_differ(path, use))
      throw DataError(fmt::format("{}: was saved with {} {}, this run has {}; use {}{}", checkpoint, path,
                                  before->second, now, before->second,
                                  path.starts_with("model.") ? "" : ", or load_weights_only: true to start anew"));
    const bool told = use == LoadUse::resume || path.starts_with("model.");
    if (told) log_info("{}: was saved with {} {}, goes on with {}", checkpoint, path, before->second, now);
  }
}

}  // namespace farspan
