// SPDX-License-Identifier: Apache-2.0
// Reads parts of parameters from the slices of a checkpoint, however these were cut.
#pragma once

#include <map>
#include <string>

#include "io/safetensors.h"
#include "optim/parameter_store.h"
#include "train/checkpoint_index.h"

namespace farspan {

class CheckpointReader {
 public:
  // Both outlive the reader. Files are opened when a slice of theirs is first needed, and mapped.
  CheckpointReader(const std::string& checkpoint, const CheckpointIndex& index);

  // values[i] = element held.part_begin + i of `parameter`'s part, for the elements held; stored as tensor `name`. Only
  // the rows that are needed are touched. Throws DataError: no such tensor, another shape or type, a value that is not
  // finite, a file that is missing or damaged.
  void read(const std::string& name, const Parameter& parameter, const HeldRange& held, float* values);

  // The first file that a tensor whose name starts with `prefix` lies in and that does not exist; empty when all do.
  std::string missing_file(const std::string& prefix) const;

 private:
  const SafetensorsFile& file(const std::string& name);
  const float* slice_data(const StoredTensor& tensor, const StoredSlice& slice);

  const std::string& checkpoint_;
  const CheckpointIndex& index_;
  std::map<std::string, const StoredTensor*> by_name_;
  std::map<std::string, SafetensorsFile> files_;
};

}  // namespace farspan
