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

}  // namespace

std::string index_json(const CheckpointIndex& index) {
  Json json;
  json["format_version"] = kFormatVersion;
  json["step"] = index.state.step;
  json["updates"] = index.state.updates;
  json["data_identity"] = index.state.data_identity;
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
    if (json.at("format_version").get<int>() != kFormatVersion)
      throw DataError(fmt::format("{}: format_version {}, this version reads {}", path,
                                  json.at("format_version").get<int>(), kFormatVersion));
    CheckpointIndex index;
    index.state.step = json.at("step").get<int64_t>();
    index.state.updates = json.at("updates").get<int64_t>();
    index.state.data_identity = json.at("data_identity").get<std::string>();
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
