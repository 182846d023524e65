// SPDX-License-Identifier: Apache-2.0
#include "config/load.h"

#include <algorithm>
#include <filesystem>
#include <fmt/format.h>
#include <iterator>
#include <span>

#include "base/error.h"
#include "base/log.h"
#include "base/nearest_name.h"
#include "config/keys.h"
#include "config/presets.h"
#include "config/yaml.h"

namespace farspan {
namespace {

// One value on its way into the configuration.
struct Setting {
  const Key* key = nullptr;
  ValueText value;
  std::string origin;  // "legal.yaml:4" or "--num-layers"
};

// Says where a key of that name belongs, or which known name is nearest: in the same section first, then anywhere.
[[noreturn]] void fail_unknown(const std::string& place, const std::string& path) {
  const size_t dot = path.find('.');
  const std::string section = path.substr(0, dot);
  const std::string name = dot == std::string::npos ? "" : path.substr(dot + 1);
  const std::span<const std::string> sections = config_sections();

  std::vector<std::string> names;        // of this section
  std::vector<std::string> other_names;  // "section.name" of the others
  for (const Key& key : config_keys()) {
    (key.section == section ? names : other_names).push_back(key.section == section ? key.name : key.path());
    if (key.section != section && (key.name == name || key.name == path)) {
      throw ConfigError(fmt::format("{}: key {} does not belong here; it belongs in section {}, as {}", place, path,
                                    key.section, key.path()));
    }
  }
  if (names.empty()) {
    const std::string meant = nearest_name(section, sections);
    throw ConfigError(fmt::format("{}: unknown section {}{}; the sections are {}", place, section,
                                  meant.empty() ? "" : fmt::format(", did you mean {}?", meant),
                                  fmt::join(sections, ", ")));
  }
  if (name.empty()) {
    throw ConfigError(fmt::format("{}: {} is a section; its keys stand under it, indented", place, section));
  }
  std::string suggestion = did_you_mean(name, names);
  if (suggestion.empty()) suggestion = did_you_mean(path, other_names);
  throw ConfigError(fmt::format("{}: unknown key {}{}", place, path, suggestion));
}

std::vector<Setting> settings_of_file(const std::string& file) {
  std::vector<Setting> settings;
  for (YamlEntry& entry : read_yaml(file)) {
    std::string place = fmt::format("{}:{}", file, entry.line);
    const Key* key = find_key(entry.path);
    if (key == nullptr && entry.path.find('.') != std::string::npos && is_key_group(entry.path)) {
      throw ConfigError(fmt::format("{}: {} is a group of keys; they stand under it, indented", place, entry.path));
    }
    if (key == nullptr) fail_unknown(place, entry.path);
    for (const Setting& earlier : settings) {
      if (earlier.key != key) continue;
      throw ConfigError(
          fmt::format("{}: {} is given twice, first at {}; keep one of the two", place, entry.path, earlier.origin));
    }
    settings.push_back({key, std::move(entry.value), std::move(place)});
  }
  return settings;
}

std::vector<Setting> settings_of_flags(const Overrides& overrides) {
  std::vector<Setting> settings;
  for (const auto& [path, text] : overrides) {
    const Key* key = find_key(path);
    if (key == nullptr) fail_unknown("command line", path);
    ValueText value;
    if (key->is_list) {
      value = {split_commas(text), true};
    } else {
      value.items.push_back(text);
    }
    const auto earlier = std::find_if(settings.begin(), settings.end(), [&](const Setting& s) { return s.key == key; });
    if (earlier == settings.end()) {
      settings.push_back({key, std::move(value), key->flag()});
    } else if (key->is_list) {
      earlier->value.items.insert(earlier->value.items.end(), value.items.begin(), value.items.end());
    } else {
      throw ConfigError(fmt::format("{} is given twice, as {} and {}; keep one of the two", key->flag(),
                                    earlier->value.items.at(0), text));
    }
  }
  return settings;
}

void apply(Config& config, const Setting& setting) {
  try {
    setting.key->read(config, setting.value);
  } catch (const ValueError& error) {
    const bool from_flag = setting.origin.starts_with("--");
    throw ConfigError(
        fmt::format("{}{}: {}", setting.origin, from_flag ? "" : ": " + setting.key->path(), error.what()));
  }
  config.origins[setting.key->path()] = setting.origin;
}

// The preset comes before all other keys wherever it is named; a flag's beats the file's.
void apply_preset_of(Config& config, const std::vector<Setting>& settings) {
  const Setting* named = nullptr;
  for (const Setting& setting : settings) {
    if (setting.key->path() == "model.preset") named = &setting;
  }
  if (named == nullptr) return;
  apply(config, *named);
  const std::string name = config.model.preset;
  if (name.empty() || apply_preset(config, name)) return;
  throw ConfigError(fmt::format("{}: there is no preset {}{}; the presets are {}", named->origin, name,
                                did_you_mean(name, preset_names()), fmt::join(preset_names(), ", ")));
}

}  // namespace

Config load_config(const std::string& file, const Overrides& overrides) {
  Config config;
  for (const Key& key : config_keys()) config.origins[key.path()] = "default";

  std::vector<Setting> settings;
  if (!file.empty()) {
    settings = settings_of_file(file);
    config.name = std::filesystem::path(file).stem().string();
  }
  std::vector<Setting> flags = settings_of_flags(overrides);
  std::move(flags.begin(), flags.end(), std::back_inserter(settings));

  apply_preset_of(config, settings);
  for (const Setting& setting : settings) apply(config, setting);
  return config;
}

std::string effective_config_yaml(const Config& config) {
  std::string text;
  std::string section, group;
  for (const Key& key : config_keys()) {
    if (key.section != section) {
      text += key.section + ":\n";
      section = key.section;
      group.clear();
    }
    const size_t dot = key.name.find('.');
    const std::string key_group = dot == std::string::npos ? "" : key.name.substr(0, dot);
    if (key_group != group && !key_group.empty()) text += fmt::format("  {}:\n", key_group);
    group = key_group;

    const auto origin = config.origins.find(key.path());
    text += fmt::format("{}{}: {}  # {}\n", group.empty() ? "  " : "    ",
                        dot == std::string::npos ? key.name : key.name.substr(dot + 1), key.write(config),
                        origin == config.origins.end() ? "set by the program" : one_line(origin->second));
  }
  return text;
}

}  // namespace farspan
