// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <optional>
#include <vector>

#include "base/log.h"
#include "io/atomic_file.h"
#include "io/safetensors.h"
#include "train/checkpoint_index.h"

namespace farspan {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWeightsFile = "weights.safetensors";
constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr const char* kFirstMoment = "first_moment.";
constexpr const char* kSecondMoment = "second_moment.";

std::span<const std::byte> bytes_of(const Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.raw()), static_cast<size_t>(tensor.bytes())};
}

// One flat buffer of the trainer and the prefix its tensors have in a file.
struct StoredBuffer {
  std::string prefix;
  const Tensor& flat;
};

void write_tensors(const std::string& path, const std::string& file, const ParameterTable& table,
                   const std::vector<StoredBuffer>& buffers, CheckpointIndex& index) {
  SafetensorsWriter writer(path);
  for (const StoredBuffer& buffer : buffers)
    for (const Parameter& parameter : table.parameters())
      writer.declare(buffer.prefix + parameter.name, DType::f32, parameter.shape);
  for (const StoredBuffer& buffer : buffers) {
    for (const Parameter& parameter : table.parameters()) {
      const std::string name = buffer.prefix + parameter.name;
      writer.write(name, bytes_of(table.view(buffer.flat, parameter)));
      index.tensors.push_back({name, file, parameter.shape});
    }
  }
  writer.finish();
}

// N of a folder named step_N, or nothing.
std::optional<int64_t> step_of(const fs::path& folder) {
  const std::string name = folder.filename().string();
  constexpr std::string_view kPrefix = "step_";
  int64_t step = 0;
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  if (error != std::errc() || stop != end) return std::nullopt;
  return step;
}

// Complete checkpoints in a folder, oldest first.
std::vector<std::pair<int64_t, fs::path>> checkpoints_in(const fs::path& folder) {
  std::vector<std::pair<int64_t, fs::path>> found;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const std::optional<int64_t> step = step_of(entry.path());
    if (step && *step >= 0 && fs::exists(entry.path() / kIndexFile, ignored)) found.emplace_back(*step, entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

void read_tensors(const fs::path& path, const ParameterTable& table, const std::string& prefix, const Tensor& flat) {
  const SafetensorsFile file = SafetensorsFile::open(path.string());
  for (const Parameter& parameter : table.parameters()) {
    const TensorEntry* entry = file.find(prefix + parameter.name);
    if (entry == nullptr)
      throw DataError(fmt::format("{}: no tensor {}{}; the model of this configuration needs it", path.string(), prefix,
                                  parameter.name));
    if (!(entry->shape == parameter.shape) || entry->dtype != DType::f32)
      throw DataError(fmt::format("{}: tensor {} is {} {}, the model of this configuration needs f32 {}", path.string(),
                                  entry->name, name_of(entry->dtype), entry->shape.str(), parameter.shape.str()));
    const std::span<const std::byte> bytes = file.data(*entry);
    const Tensor target = table.view(flat, parameter);
    std::memcpy(target.raw(), bytes.data(), bytes.size());
    const float* values = target.data<float>();
    const float* bad = std::find_if_not(values, values + target.numel(), [](float x) { return std::isfinite(x); });
    if (bad != values + target.numel())
      throw DataError(fmt::format("{}: tensor {} holds {} at element {}; the file is damaged or training had diverged",
                                  path.string(), entry->name, *bad, bad - values));
  }
}

void refuse_foreign_tensors(const fs::path& path, const ParameterTable& table) {
  const SafetensorsFile file = SafetensorsFile::open(path.string());
  for (const TensorEntry& entry : file.entries()) {
    if (!table.contains(entry.name))
      throw DataError(fmt::format("{}: holds tensor {}, which the model of this configuration does not have",
                                  path.string(), entry.name));
  }
}

void write_parts(const fs::path& partial, RankTrainer& trainer, const CheckpointState& state) {
  WeightState& weights = trainer.weights();
  const ParameterTable& table = trainer.parameters();
  CheckpointIndex index;
  index.state = state;
  write_tensors((partial / kWeightsFile).string(), kWeightsFile, table, {{"", weights.master}}, index);
  std::vector<StoredBuffer> moments;
  if (weights.first_moment.taken()) {
    moments.push_back({kFirstMoment, weights.first_moment});
    moments.push_back({kSecondMoment, weights.second_moment});
  }
  write_tensors((partial / kOptimizerFile).string(), kOptimizerFile, table, moments, index);
  write_file_atomically((partial / kIndexFile).string(), index_json(index));
}

// The index must name the model's weights in the file where this version keeps them.
void check_index(const std::string& checkpoint, const CheckpointIndex& index, const ParameterTable& table) {
  size_t weights = 0;
  for (const StoredTensor& tensor : index.tensors) {
    if (tensor.file != kWeightsFile && tensor.file != kOptimizerFile)
      throw DataError(fmt::format("{}/{}: tensor {} lies in {}; this version reads {} and {}", checkpoint, kIndexFile,
                                  tensor.name, tensor.file, kWeightsFile, kOptimizerFile));
    if (tensor.file != kWeightsFile) continue;
    ++weights;
    if (!table.contains(tensor.name) || !(table.find(tensor.name).shape == tensor.shape))
      throw DataError(fmt::format("{}/{}: names tensor {} {}, which the model of this configuration does not have",
                                  checkpoint, kIndexFile, tensor.name, tensor.shape.str()));
  }
  if (weights != table.parameters().size())
    throw DataError(fmt::format("{}/{}: names {} weights, the model of this configuration has {}", checkpoint,
                                kIndexFile, weights, table.parameters().size()));
}

}  // namespace

std::string save_checkpoint(const std::string& folder, RankTrainer& trainer, const CheckpointState& state,
                            int64_t keep) {
  const fs::path final_path = fs::path(folder) / fmt::format("step_{}", state.step);
  const fs::path partial = fs::path(folder) / fmt::format(".step_{}.partial", state.step);
  std::error_code error;
  fs::remove_all(partial, error);
  fs::create_directories(partial, error);
  if (error) throw DataError(fmt::format("{}: cannot be created: {}", partial.string(), error.message()));
  try {
    write_parts(partial, trainer, state);
  } catch (...) {
    fs::remove_all(partial, error);  // it may be what fills the disk
    throw;
  }
  fs::remove_all(final_path, error);
  fs::rename(partial, final_path, error);
  if (error) throw DataError(fmt::format("{}: cannot be renamed into place: {}", final_path.string(), error.message()));
  if (keep > 0) {
    std::vector<fs::path> earlier;  // oldest first
    for (const auto& [step, path] : checkpoints_in(folder))
      if (step < state.step) earlier.push_back(path);
    for (size_t i = 0; i + static_cast<size_t>(keep) - 1 < earlier.size(); ++i) fs::remove_all(earlier[i], error);
  }
  return final_path.string();
}

std::string find_checkpoint(const std::string& path) {
  std::error_code error;
  if (fs::exists(fs::path(path) / kIndexFile, error)) return path;
  for (const fs::path& folder : {fs::path(path), fs::path(path) / "checkpoints"}) {
    const auto found = checkpoints_in(folder);
    if (!found.empty()) return found.back().second.string();
  }
  throw DataError(
      fmt::format("load: no complete checkpoint in {}; give a step_N folder that holds {}, or the folder of "
                  "such folders",
                  path, kIndexFile));
}

CheckpointState read_checkpoint_state(const std::string& checkpoint) { return read_index(checkpoint).state; }

void load_checkpoint(const std::string& checkpoint, RankTrainer& trainer, CheckpointParts parts) {
  const CheckpointIndex index = read_index(checkpoint);
  const fs::path folder(checkpoint);
  const ParameterTable& table = trainer.parameters();
  WeightState& weights = trainer.weights();
  check_index(checkpoint, index, table);
  refuse_foreign_tensors(folder / kWeightsFile, table);
  read_tensors(folder / kWeightsFile, table, "", weights.master);
  trainer.refresh_compute_weights();
  if (parts == CheckpointParts::weights) return;
  trainer.set_updates(index.state.updates);
  if (!weights.first_moment.taken()) return;
  const fs::path moments = folder / kOptimizerFile;
  if (!fs::exists(moments))
    throw DataError(
        fmt::format("{} is missing, so training cannot go on from step {}; to start anew from the weights "
                    "alone, set load_weights_only: true",
                    moments.string(), index.state.step));
  read_tensors(moments, table, kFirstMoment, weights.first_moment);
  read_tensors(moments, table, kSecondMoment, weights.second_moment);
}

}  // namespace farspan
