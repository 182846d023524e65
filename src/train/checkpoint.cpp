// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <map>
#include <optional>
#include <vector>

#include "device/host_access.h"
#include "io/atomic_file.h"
#include "io/safetensors.h"
#include "train/checkpoint_index.h"
#include "train/checkpoint_reader.h"
#include "train/model_share.h"

namespace farspan {
namespace {

namespace fs = std::filesystem;

// One kind of state: the file it is in and the prefix its tensors have there and in the index.
struct StoredKind {
  StateKind kind;
  const char* file;
  const char* prefix;
};
constexpr StoredKind kWeights = {StateKind::weights, "weights", ""};
constexpr std::array<StoredKind, 2> kMoments = {{{StateKind::first_moment, "optimizer", "first_moment."},
                                                 {StateKind::second_moment, "optimizer", "second_moment."}}};

// weights.safetensors, or weights-tp0-pp1.safetensors where the model is cut.
std::string file_of(const Config& config, const StoredKind& kind, int tensor_rank, int stage) {
  const ParallelConfig& parallel = config.parallel;
  if (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size == 1)
    return fmt::format("{}.safetensors", kind.file);
  return fmt::format("{}-tp{}-pp{}.safetensors", kind.file, tensor_rank, stage);
}

// Where a section lies in the whole parameter.
StoredSlice slice_of(const std::string& file, const std::string& prefix, const Parameter& parameter,
                     const Section& section) {
  StoredSlice slice = {
      .file = file, .entry = prefix + parameter.name, .offset = parameter.whole, .shape = parameter.shape};
  for (int i = 0; i < slice.offset.rank(); ++i) slice.offset[i] = 0;
  if (parameter.cut == Cut::none) return slice;
  const int dim = parameter.cut == Cut::rows ? 0 : 1;
  slice.offset[dim] = section.whole_begin;
  slice.shape[dim] = section.length;
  slice.entry += fmt::format("[{}:{}]", section.whole_begin, section.whole_begin + section.length);
  return slice;
}

// Calls body(parameter, section) with every section that its rank owns, in order.
template <typename Body>
void for_each_owned(std::span<const Parameter> parameters, Body&& body) {
  for (const Parameter& parameter : parameters)
    for (const Section& section : parameter.sections)
      if (section.owned) body(parameter, section);
}

// --- Writing. ---

// The files of one rank: what it owns, kind after kind.
void write_kinds(const fs::path& folder, RankTrainer& trainer, std::span<const StoredKind> kinds, const std::string& id,
                 bool writes) {
  const ParameterTable& table = trainer.parameters();
  const Config& config = trainer.config();
  const RankContext& context = trainer.context();
  const std::string name =
      file_of(config, kinds.front(), context.coordinate(Dimension::tp), context.coordinate(Dimension::pp));
  std::optional<SafetensorsWriter> writer;
  if (writes) {
    writer.emplace((folder / name).string(), std::map<std::string, std::string>{{kCheckpointId, id}});
    for (const StoredKind& kind : kinds) {
      if (!trainer.store().state(kind.kind).defined()) continue;
      for_each_owned(table.parameters(), [&](const Parameter& parameter, const Section& section) {
        const StoredSlice slice = slice_of(name, kind.prefix, parameter, section);
        writer->declare(slice.entry, DType::f32, slice.shape);
      });
    }
  }
  for (const StoredKind& kind : kinds) {
    trainer.store().visit_units(kind.kind, [&](const ParameterUnit& unit, const Tensor& flat) {
      if (!writes) return;
      for_each_owned(table.parameters_of(unit), [&](const Parameter& parameter, const Section& section) {
        // A section is one run of the part: rows, or all of a part cut by columns.
        const int64_t row = parameter.shape.numel() / parameter.shape[0];
        const bool rows = parameter.cut == Cut::rows;
        const int64_t begin = parameter.offset - unit.begin + (rows ? section.part_begin * row : 0);
        const int64_t length = rows ? section.length * row : parameter.shape.numel();
        const std::span<const float> values(flat.data<float>() + begin, static_cast<size_t>(length));
        writer->write(slice_of(name, kind.prefix, parameter, section).entry, std::as_bytes(values));
      });
    });
  }
  if (writes) writer->finish();
}

// What all ranks together write: every part's table is known everywhere.
CheckpointIndex index_of(RankTrainer& trainer, const CheckpointState& state) {
  const Config& config = trainer.config();
  std::vector<StoredKind> kinds = {kWeights};
  for (const StoredKind& kind : kMoments)
    if (trainer.store().state(kind.kind).defined()) kinds.push_back(kind);

  CheckpointIndex index = {.id = {}, .state = state, .tensors = {}};
  std::map<std::string, size_t> by_name;
  for (int stage = 0; stage < config.parallel.pipeline_model_parallel_size; ++stage) {
    for (int rank = 0; rank < config.parallel.tensor_model_parallel_size; ++rank) {
      const ParameterTable table(config.model, model_share(config, trainer.sizes(), stage, rank));
      for (const StoredKind& kind : kinds) {
        for_each_owned(table.parameters(), [&](const Parameter& parameter, const Section& section) {
          const std::string name = kind.prefix + parameter.name;
          const auto [place, is_new] = by_name.emplace(name, index.tensors.size());
          if (is_new) index.tensors.push_back({.name = name, .shape = parameter.whole, .slices = {}});
          index.tensors[place->second].slices.push_back(
              slice_of(file_of(config, kind, rank, stage), kind.prefix, parameter, section));
        });
      }
    }
  }
  index.id = index_id(index);
  return index;
}

// Complete checkpoints in a folder, oldest first.
std::vector<std::pair<int64_t, fs::path>> checkpoints_in(const fs::path& folder) {
  std::vector<std::pair<int64_t, fs::path>> found;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const std::optional<int64_t> step = checkpoint_step(entry.path().filename().string());
    if (step && *step >= 0 && fs::exists(entry.path() / kIndexFile, ignored)) found.emplace_back(*step, entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

void create_folder(const fs::path& partial) {
  std::error_code error;
  fs::remove_all(partial, error);
  fs::create_directories(partial, error);
  if (error) throw DataError(fmt::format("{}: cannot be created: {}", partial.string(), error.message()));
}

void rename_into_place(const fs::path& partial, const fs::path& final_path) {
  std::error_code error;
  fs::remove_all(final_path, error);
  fs::rename(partial, final_path, error);
  if (error) throw DataError(fmt::format("{}: cannot be renamed into place: {}", final_path.string(), error.message()));
}

// Removes all but the `keep` - 1 newest of the checkpoints before `step`.
void remove_older(const std::string& folder, int64_t step, int64_t keep) {
  std::vector<fs::path> earlier;  // oldest first
  for (const auto& [at, path] : checkpoints_in(folder))
    if (at < step) earlier.push_back(path);
  std::error_code ignored;
  for (size_t i = 0; i + static_cast<size_t>(keep) - 1 < earlier.size(); ++i) fs::remove_all(earlier[i], ignored);
}

}  // namespace

std::optional<int64_t> checkpoint_step(const std::string& name) {
  constexpr std::string_view kPrefix = "step_";
  int64_t step = 0;
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  if (error != std::errc() || stop != end) return std::nullopt;
  return step;
}

std::string save_checkpoint(const std::string& folder, RankTrainer& trainer, const CheckpointState& state,
                            int64_t keep) {
  const fs::path final_path = fs::path(folder) / fmt::format("step_{}", state.step);
  const fs::path partial = fs::path(folder) / fmt::format(".step_{}.partial", state.step);
  const RankContext& context = trainer.context();
  Communicator& world = context.group(Dimension::world);
  const bool writes = context.group(Dimension::dp_cp).rank() == 0;
  const CheckpointIndex index = index_of(trainer, state);
  try {
    if (world.rank() == 0) create_folder(partial);
    world.barrier("checkpoint folder");
    write_kinds(partial, trainer, {&kWeights, 1}, index.id, writes);
    write_kinds(partial, trainer, kMoments, index.id, writes);
    world.barrier("checkpoint files");
    if (world.rank() == 0) write_file_atomically((partial / kIndexFile).string(), index_json(index));
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(partial, ignored);  // it may be what fills the disk
    throw;
  }
  if (world.rank() == 0) {
    rename_into_place(partial, final_path);
    if (keep > 0) remove_older(folder, state.step, keep);
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

namespace {

// Copies what this rank holds of a kind from the checkpoint into the store.
void read_kind(CheckpointReader& reader, RankTrainer& trainer, const StoredKind& kind) {
  if (!trainer.store().state(kind.kind).defined()) return;
  for (const Parameter& parameter : trainer.parameters().parameters()) {
    const Tensor held = trainer.store().held_values(kind.kind, parameter);
    if (!held.defined()) continue;
    HostFilled values(*trainer.context().device, held);
    reader.read(kind.prefix + parameter.name, parameter, trainer.store().held(parameter),
                values.tensor().data<float>());
    values.send();
  }
}

bool has_moments(const CheckpointIndex& index) {
  return std::any_of(index.tensors.begin(), index.tensors.end(),
                     [](const StoredTensor& tensor) { return tensor.name.starts_with(kMoments[0].prefix); });
}

// A head on one side alone: by names, it would only be a tensor too few or too many.
void check_tying(const std::string& checkpoint, const CheckpointIndex& index, const ModelConfig& model) {
  constexpr const char* kHead = "head.weight";
  const bool untied = std::any_of(index.tensors.begin(), index.tensors.end(),
                                  [&](const StoredTensor& tensor) { return tensor.name == kHead; });
  if (untied == model.untie_embeddings_and_output_weights) return;
  throw DataError(fmt::format(
      "{}: has {} tensor {}, so its output layer {} tied to the embedding; use untie_embeddings_and_output_weights {}",
      checkpoint, untied ? "a" : "no", kHead, untied ? "is not" : "is", untied));
}

// A tensor that the model does not have tells that this is another model's checkpoint.
void refuse_foreign_tensors(const std::string& checkpoint, const CheckpointIndex& index, const ModelConfig& model) {
  const ParameterTable whole(model);
  for (const StoredTensor& tensor : index.tensors) {
    std::string name = tensor.name;
    for (const StoredKind& kind : kMoments)
      if (name.starts_with(kind.prefix)) name = name.substr(std::string_view(kind.prefix).size());
    if (!whole.contains(name))
      throw DataError(fmt::format("{}/{}: names tensor {} {}, which the model of this configuration does not have",
                                  checkpoint, kIndexFile, tensor.name, tensor.shape.str()));
  }
}

}  // namespace

void load_checkpoint(const std::string& checkpoint, RankTrainer& trainer, CheckpointParts parts) {
  const CheckpointIndex index = read_index(checkpoint);
  check_tying(checkpoint, index, trainer.config().model);
  refuse_foreign_tensors(checkpoint, index, trainer.config().model);
  CheckpointReader reader(checkpoint, index);
  read_kind(reader, trainer, kWeights);
  trainer.store().distribute_weights();
  if (parts == CheckpointParts::weights) return;
  trainer.set_updates(index.state.updates);
  if (!trainer.store().state(StateKind::first_moment).defined()) return;
  const std::string missing = has_moments(index) ? reader.missing_file(kMoments[0].prefix) : "optimizer state";
  if (!missing.empty())
    throw DataError(
        fmt::format("{}: {} is missing, so training cannot go on from step {}; to start anew from the weights alone, "
                    "set load_weights_only: true",
                    checkpoint, missing, index.state.step));
  for (const StoredKind& kind : kMoments) read_kind(reader, trainer, kind);
}

}  // namespace farspan
