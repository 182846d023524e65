// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint_index.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace farspan {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kFormatVersion = 1;

Json sizes_of(const Shape& shape) {
  Json sizes = Json::array();
  for (int i = 0; i < shape.rank(); ++i) sizes.push_back(shape[i]);
  return sizes;
}

// A number of steps: a whole number that a run could have reached.
int64_t count_at(const Json& json, const char* key, const std::string& path) {
  constexpr int64_t kMostSteps = int64_t{1} << 40;
  const Json& value = json.at(key);
  if (!value.is_number_integer() || value.get<int64_t>() < 0 || value.get<int64_t>() > kMostSteps)
    throw DataError(fmt::format("{}: {} is {}, expected a whole number of steps", path, key, value.dump()));
  return value.get<int64_t>();
}

}  // namespace

std::string index_json(const CheckpointIndex& index) {
  Json json;
  json["format_version"] = kFormatVersion;
  json["step"] = index.state.step;
  json["updates"] = index.state.updates;
  json["data_identity"] = index.state.data_identity;
  json["settings"] = index.state.settings;
  Json& tensors = json["tensors"] = Json::object();
  for (const StoredTensor& tensor : index.tensors) {
    Json offsets = Json::array();
    for (int i = 0; i < tensor.shape.rank(); ++i) offsets.push_back(0);
    const Json slice = {{"file", tensor.file}, {"offset", offsets}, {"shape", sizes_of(tensor.shape)}};
    tensors[tensor.name] = {{"shape", sizes_of(tensor.shape)}, {"slices", Json::array({slice})}};
  }
  return json.dump(1) + "\n";
}

CheckpointIndex read_index(const std::string& checkpoint) {
  const std::string path = (std::filesystem::path(checkpoint) / kIndexFile).string();
  std::ifstream file(path);
  if (!file) throw DataError(fmt::format("{}: cannot be read; a checkpoint without its index is not loaded", path));
  try {
    const Json json = Json::parse(file);
    if (json.at("format_version") != kFormatVersion)
      throw DataError(fmt::format("{}: format_version {}, this version reads {}", path,
                                  json.at("format_version").dump(), kFormatVersion));
    CheckpointIndex index;
    index.state.step = count_at(json, "step", path);
    index.state.updates = count_at(json, "updates", path);
    index.state.data_identity = json.at("data_identity").get<std::string>();
    index.state.settings = json.at("settings").get<SavedSettings>();
    for (const auto& [name, tensor] : json.at("tensors").items()) {
      const std::vector<int64_t> sizes = tensor.at("shape").get<std::vector<int64_t>>();
      const Json& slices = tensor.at("slices");
      if (slices.size() != 1 || sizes.size() > Shape::kMaxRank)
        throw DataError(fmt::format("{}: tensor {} has {} slices of rank {}; this version reads whole tensors", path,
                                    name, slices.size(), sizes.size()));
      index.tensors.push_back({name, slices[0].at("file").get<std::string>(), Shape(std::span<const int64_t>(sizes))});
    }
    return index;
  } catch (const nlohmann::json::exception& error) {
    throw DataError(fmt::format("{}: not a checkpoint index: {}", path, error.what()));
  }
}

}  // namespace farspan
