// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint_reader.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

namespace farspan {
namespace {

// Rows and columns of a whole tensor; a vector is a column.
struct Rectangle {
  Span rows;
  Span columns;
};

int64_t rows_of(const Shape& shape) { return shape[0]; }
int64_t columns_of(const Shape& shape) { return shape.numel() == 0 ? 0 : shape.numel() / shape[0]; }

Rectangle rectangle_of(const StoredSlice& slice) {
  const int64_t column = slice.offset.rank() > 1 ? slice.offset[1] : 0;
  return {{slice.offset[0], slice.offset[0] + rows_of(slice.shape)}, {column, column + columns_of(slice.shape)}};
}

Rectangle rectangle_of(const Parameter& parameter, const Section& section) {
  const Span along = {section.whole_begin, section.whole_begin + section.length};
  if (parameter.cut == Cut::columns) return {{0, rows_of(parameter.whole)}, along};
  return {along, {0, columns_of(parameter.whole)}};
}

}  // namespace

CheckpointReader::CheckpointReader(const std::string& checkpoint, const CheckpointIndex& index)
    : checkpoint_(checkpoint), index_(index) {
  for (const StoredTensor& tensor : index.tensors) by_name_.emplace(tensor.name, &tensor);
}

const SafetensorsFile& CheckpointReader::file(const std::string& name) {
  const auto found = files_.find(name);
  if (found != files_.end()) return found->second;
  const std::string path = (std::filesystem::path(checkpoint_) / name).string();
  const SafetensorsFile& opened = files_.emplace(name, SafetensorsFile::open(path)).first->second;
  const auto id = opened.metadata().find(kCheckpointId);
  const std::string found_id = id == opened.metadata().end() ? "none" : id->second;
  if (!index_.id.empty() && found_id != index_.id)
    throw DataError(
        fmt::format("{}: belongs to another checkpoint (id {}, the index has {}); restore the file that was "
                    "saved with it",
                    path, found_id, index_.id));
  return opened;
}

std::string CheckpointReader::missing_file(const std::string& prefix) const {
  for (const StoredTensor& tensor : index_.tensors) {
    if (!tensor.name.starts_with(prefix)) continue;
    for (const StoredSlice& slice : tensor.slices)
      if (!std::filesystem::exists(std::filesystem::path(checkpoint_) / slice.file)) return slice.file;
  }
  return {};
}

const float* CheckpointReader::slice_data(const StoredTensor& tensor, const StoredSlice& slice) {
  const SafetensorsFile& in = file(slice.file);
  const TensorEntry* entry = in.find(slice.entry);
  if (entry == nullptr)
    throw DataError(fmt::format("{}: no tensor {}; the model of this configuration needs it", in.path(), slice.entry));
  if (!(entry->shape == slice.shape) || entry->dtype != DType::f32)
    throw DataError(fmt::format("{}: tensor {} is {} {}, the index has f32 {} of {}", in.path(), entry->name,
                                name_of(entry->dtype), entry->shape.str(), slice.shape.str(), tensor.name));
  return reinterpret_cast<const float*>(in.data(*entry).data());
}

void CheckpointReader::read(const std::string& name, const Parameter& parameter, const HeldRange& held, float* values) {
  const auto found = by_name_.find(name);
  if (found == by_name_.end())
    throw DataError(fmt::format("{}: no tensor {}; the model of this configuration needs it", checkpoint_, name));
  const StoredTensor& tensor = *found->second;
  if (!(tensor.shape == parameter.whole))
    throw DataError(fmt::format("{}: tensor {} is {}, the model of this configuration needs {}", checkpoint_, name,
                                tensor.shape.str(), parameter.whole.str()));
  const int64_t part_columns = columns_of(parameter.shape);
  for (const Section& section : parameter.sections) {
    const Rectangle wanted = rectangle_of(parameter, section);
    for (const StoredSlice& slice : tensor.slices) {
      const Rectangle there = rectangle_of(slice);
      const Span columns = intersect(wanted.columns, there.columns);
      const Span rows = intersect(wanted.rows, there.rows);
      if (columns.empty() || rows.empty()) continue;
      const float* data = slice_data(tensor, slice);
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        // The run's place in the part, and which of its elements this rank holds.
        const bool by_columns = parameter.cut == Cut::columns;
        const int64_t part_row = by_columns ? row : section.part_begin + row - section.whole_begin;
        const int64_t part_column =
            by_columns ? section.part_begin + columns.begin - section.whole_begin : columns.begin;
        const int64_t first = part_row * part_columns + part_column;
        const Span run = intersect({first, first + columns.length()}, {held.part_begin, held.part_end});
        if (run.empty()) continue;
        const float* source = data + (row - there.rows.begin) * there.columns.length() + columns.begin -
                              there.columns.begin + run.begin - first;
        std::memcpy(values + run.begin - held.part_begin, source, static_cast<size_t>(run.length()) * sizeof(float));
      }
    }
  }
  float* end = values + held.length();
  const float* bad = std::find_if_not(values, end, [](float x) { return std::isfinite(x); });
  if (bad != end)
    throw DataError(fmt::format("{}: tensor {} holds {} at element {}; the file is damaged or training had diverged",
                                checkpoint_, name, *bad, bad - values));
}

}  // namespace farspan
