// SPDX-License-Identifier: Apache-2.0
// yaml-cpp's adaptor. It keeps both entries of a key that stands twice, and the line of each, which is all we need of
// it.
#include "config/yaml.h"

#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <map>
#include <sstream>
#include <system_error>
#include <yaml-cpp/yaml.h>

#include "base/error.h"

namespace farspan {
namespace {

constexpr uintmax_t kLargestFile = 1 << 20;  // bytes; a configuration is a page, so anything larger is another file
constexpr int kDeepest = 4;                  // maps within maps; the keys need three, and an anchor may refer to itself

std::string read_text(const std::string& file) {
  std::error_code error;
  if (!std::filesystem::exists(file, error)) throw ConfigError(fmt::format("config file {} does not exist", file));
  if (std::filesystem::is_directory(file, error)) {
    throw ConfigError(fmt::format("config file {} is a folder; name a YAML file", file));
  }
  // A pipe would be waited for, and a device may never end.
  if (!std::filesystem::is_regular_file(file, error)) {
    throw ConfigError(fmt::format("config file {} is a pipe or a device; name a YAML file", file));
  }
  std::ifstream stream(file, std::ios::binary);
  std::string text(kLargestFile + 1, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (stream.bad() || (stream.fail() && !stream.eof())) {
    throw ConfigError(fmt::format("config file {} cannot be read", file));
  }
  text.resize(static_cast<size_t>(stream.gcount()));
  if (text.size() > kLargestFile) {
    throw ConfigError(fmt::format("config file {} is larger than {} bytes; is it a data file?", file, kLargestFile));
  }
  return text;
}

std::string_view kind_of(const YAML::Node& node) {
  if (node.IsScalar()) return "a single value";
  if (node.IsSequence()) return "a list";
  return node.IsMap() ? "a map" : "nothing";
}

class Flattener {
 public:
  explicit Flattener(const std::string& file) : file_(file) {}

  // Appends the entries of `map`, whose own path is `prefix` (empty for the document).
  void add_map(const YAML::Node& map, const std::string& prefix, int depth) {
    std::map<std::string, int64_t> lines;
    for (const auto& pair : map) {
      const YAML::Node& key = pair.first;
      const int64_t line = key.Mark().line + 1;
      if (!key.IsScalar()) fail(line, fmt::format("a key must be a name, found {}", kind_of(key)));
      const std::string path = prefix.empty() ? key.Scalar() : prefix + "." + key.Scalar();
      const auto [first, fresh] = lines.emplace(key.Scalar(), line);
      if (!fresh) {
        fail(line, fmt::format("{} is given twice, first in line {}; keep one of the two", path, first->second));
      }
      add_value(pair.second, path, line, depth);
    }
  }

  std::vector<YamlEntry> take() { return std::move(entries_); }

  [[noreturn]] void fail(int64_t line, const std::string& reason) const {
    throw ConfigError(fmt::format("{}:{}: {}", file_, line, reason));
  }

 private:
  void add_value(const YAML::Node& value, const std::string& path, int64_t line, int depth) {
    if (value.IsMap()) {
      if (depth == kDeepest)
        fail(line, fmt::format("{} lies too deep: no key is nested more than {} maps", path, kDeepest));
      return add_map(value, path, depth + 1);
    }
    if (value.IsSequence()) return add_list(value, path, line);
    if (value.IsScalar()) {
      entries_.push_back({path, {{value.Scalar()}, false}, line});
      return;
    }
    // A section with nothing under it, such as when all its keys are commented out, is an empty map.
    if (depth > 1) fail(line, fmt::format("{} has no value; give one or leave the key out", path));
  }

  void add_list(const YAML::Node& list, const std::string& path, int64_t line) {
    ValueText value;
    value.is_list = true;
    for (const YAML::Node& item : list) {
      if (!item.IsScalar()) fail(line, fmt::format("{}: a list holds plain values, found {}", path, kind_of(item)));
      value.items.push_back(item.Scalar());
    }
    entries_.push_back({path, std::move(value), line});
  }

  const std::string& file_;
  std::vector<YamlEntry> entries_;
};

}  // namespace

std::vector<YamlEntry> read_yaml(const std::string& file) {
  const std::string text = read_text(file);
  Flattener flattener(file);
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(text);
    if (documents.empty() || (documents.size() == 1 && documents[0].IsNull())) return {};
    if (documents.size() > 1) {
      flattener.fail(documents[1].Mark().line + 1, "a second YAML document begins; a config file is one document");
    }
    if (!documents[0].IsMap()) {
      flattener.fail(documents[0].Mark().line + 1,
                     fmt::format("expected sections such as \"model:\" with keys under them, "
                                 "found {}",
                                 kind_of(documents[0])));
    }
    flattener.add_map(documents[0], "", 1);
  } catch (const YAML::Exception& error) {
    flattener.fail(error.mark.is_null() ? 1 : error.mark.line + 1, fmt::format("not YAML: {}", error.msg));
  }
  return flattener.take();
}

}  // namespace farspan
