// SPDX-License-Identifier: Apache-2.0
// index.json of a checkpoint, as text and back.
#pragma once

#include <string>
#include <vector>

#include "tensor/tensor.h"
#include "train/checkpoint.h"

namespace farspan {

inline constexpr const char* kIndexFile = "index.json";

struct StoredTensor {
  std::string name;
  std::string file;  // within the checkpoint's folder
  Shape shape;       // global; this version stores every tensor in one whole slice
};

struct CheckpointIndex {
  CheckpointState state;
  std::vector<StoredTensor> tensors;
};

std::string index_json(const CheckpointIndex& index);

// Throws DataError with the path for anything that is not such an index.
CheckpointIndex read_index(const std::string& checkpoint);

}  // namespace farspan
