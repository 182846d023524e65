// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint_index.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/philox.h"

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

Shape shape_at(const Json& json, const char* key, const std::string& path, const std::string& name) {
  const std::vector<int64_t> sizes = json.at(key).get<std::vector<int64_t>>();
  const bool bad = std::any_of(sizes.begin(), sizes.end(), [](int64_t size) { return size < 0; });
  if (bad || sizes.empty() || sizes.size() > Shape::kMaxRank)
    throw DataError(fmt::format("{}: tensor {} has {} {}", path, name, key, json.at(key).dump()));
  int64_t elements = 1;
  for (int64_t size : sizes)
    if (__builtin_mul_overflow(elements, size, &elements))
      throw DataError(fmt::format("{}: tensor {} has {} {}, more elements than there can be", path, name, key,
                                  json.at(key).dump()));
  return Shape(std::span<const int64_t>(sizes));
}

// Whether two slices of one tensor share an element.
bool overlap(const StoredSlice& a, const StoredSlice& b) {
  for (int i = 0; i < a.shape.rank(); ++i)
    if (a.offset[i] + a.shape[i] <= b.offset[i] || b.offset[i] + b.shape[i] <= a.offset[i]) return false;
  return true;
}

// Slices inside the tensor that do not overlap and have as many elements as it has cover it exactly.
void check_cover(const StoredTensor& tensor, const std::string& path) {
  int64_t elements = 0;
  for (size_t i = 0; i < tensor.slices.size(); ++i) {
    const StoredSlice& slice = tensor.slices[i];
    bool inside = slice.shape.rank() == tensor.shape.rank() && slice.offset.rank() == tensor.shape.rank();
    for (int d = 0; inside && d < tensor.shape.rank(); ++d)
      inside = slice.offset[d] <= tensor.shape[d] && slice.shape[d] <= tensor.shape[d] - slice.offset[d];
    if (!inside)
      throw DataError(fmt::format("{}: tensor {} {} has a slice {} at {}, which is not inside it", path, tensor.name,
                                  tensor.shape.str(), slice.shape.str(), slice.offset.str()));
    for (size_t j = 0; j < i; ++j)
      if (overlap(slice, tensor.slices[j]))
        throw DataError(fmt::format("{}: tensor {} has two slices for the same elements, at {} and at {}", path,
                                    tensor.name, tensor.slices[j].offset.str(), slice.offset.str()));
    elements += slice.shape.numel();
  }
  if (elements != tensor.shape.numel())
    throw DataError(fmt::format("{}: the slices of tensor {} hold {} elements, the tensor has {}", path, tensor.name,
                                elements, tensor.shape.numel()));
}

StoredTensor tensor_of(const std::string& name, const Json& json, const std::string& path) {
  StoredTensor tensor = {.name = name, .shape = shape_at(json, "shape", path, name), .slices = {}};
  for (const Json& slice : json.at("slices")) {
    tensor.slices.push_back({.file = slice.at("file").get<std::string>(),
                             .entry = slice.value("tensor", name),
                             .offset = shape_at(slice, "offset", path, name),
                             .shape = shape_at(slice, "shape", path, name)});
    const std::string& file = tensor.slices.back().file;
    if (file.empty() || file.find('/') != std::string::npos || !file.ends_with(".safetensors"))
      throw DataError(fmt::format("{}: tensor {} lies in \"{}\"; a file of the checkpoint's own folder is needed", path,
                                  name, file));
  }
  check_cover(tensor, path);
  return tensor;
}

}  // namespace

std::string index_id(const CheckpointIndex& index) {
  CheckpointIndex without = index;
  without.id.clear();
  return fmt::format("{:016x}", name_hash(index_json(without)));
}

std::string index_json(const CheckpointIndex& index) {
  Json json;
  if (!index.id.empty()) json["id"] = index.id;
  json["format_version"] = kFormatVersion;
  json["step"] = index.state.step;
  json["updates"] = index.state.updates;
  json["data_identity"] = index.state.data_identity;
  json["settings"] = index.state.settings;
  Json& tensors = json["tensors"] = Json::object();
  for (const StoredTensor& tensor : index.tensors) {
    Json slices = Json::array();
    for (const StoredSlice& slice : tensor.slices)
      slices.push_back({{"file", slice.file},
                        {"tensor", slice.entry},
                        {"offset", sizes_of(slice.offset)},
                        {"shape", sizes_of(slice.shape)}});
    tensors[tensor.name] = {{"shape", sizes_of(tensor.shape)}, {"slices", slices}};
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
    index.id = json.value("id", "");
    index.state.step = count_at(json, "step", path);
    index.state.updates = count_at(json, "updates", path);
    index.state.data_identity = json.at("data_identity").get<std::string>();
    index.state.settings = json.at("settings").get<SavedSettings>();
    for (const auto& [name, tensor] : json.at("tensors").items())
      index.tensors.push_back(tensor_of(name, tensor, path));
    if (!index.id.empty() && index.id != index_id(index))
      throw DataError(fmt::format("{}: was changed after it was written (id {}, its content has {}); restore it", path,
                                  index.id, index_id(index)));
    return index;
  } catch (const nlohmann::json::exception& error) {
    throw DataError(fmt::format("{}: not a checkpoint index: {}", path, error.what()));
  }
}

}  // namespace farspan
