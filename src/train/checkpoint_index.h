// SPDX-License-Identifier: Apache-2.0
// index.json of a checkpoint, as text and back.
#pragma once

#include <string>
#include <vector>

#include "tensor/tensor.h"
#include "train/checkpoint.h"

namespace farspan {

inline constexpr const char* kIndexFile = "index.json";

// A rectangle of a tensor, in a file of its own place.
struct StoredSlice {
  std::string file;   // within the checkpoint's folder
  std::string entry;  // name in the file
  Shape offset;       // of the slice's first element in the whole tensor
  Shape shape;
};

struct StoredTensor {
  std::string name;
  Shape shape;                      // of the whole
  std::vector<StoredSlice> slices;  // cover it, each element once
};

// Key of the metadata in which every file of a checkpoint carries the index's id.
inline constexpr const char* kCheckpointId = "checkpoint";

struct CheckpointIndex {
  std::string id;  // index_id; empty in checkpoints of before there was one
  CheckpointState state;
  std::vector<StoredTensor> tensors;
};

// A hash of all else that the index says: files of another step, run or layout carry another one.
std::string index_id(const CheckpointIndex& index);

std::string index_json(const CheckpointIndex& index);

// Throws DataError with the path for anything that is not such an index.
CheckpointIndex read_index(const std::string& checkpoint);

}  // namespace farspan
