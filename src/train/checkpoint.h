// SPDX-License-Identifier: Apache-2.0
// Checkpoints: step_N/ holds weights*.safetensors, optimizer*.safetensors and index.json, which gives each tensor's
// global shape and in which files its slices lie, the step, and the identity of the data. One rank of each part of the
// model (tensor-parallel place and pipeline stage) writes what it owns; every rank reads what it holds from whatever
// slices there are, so any layout loads what any layout saved. A folder is written beside its name and renamed when it
// is complete; one without a complete index is never loaded.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "train/rank_trainer.h"
#include "train/saved_settings.h"

namespace farspan {

struct CheckpointState {
  int64_t step = 0;     // steps taken
  int64_t updates = 0;  // of them, steps whose update was made
  std::string data_identity;
  SavedSettings settings;
};

// Writes folder/step_N and returns its path; `keep` > 0 then removes all but this and the `keep` - 1 steps before it.
// Called by every rank.
std::string save_checkpoint(const std::string& folder, RankTrainer& trainer, const CheckpointState& state,
                            int64_t keep);

// N of a folder named step_N; nothing for another name.
std::optional<int64_t> checkpoint_step(const std::string& name);

// The checkpoint that `path` means: itself, or the newest complete step_N in it (or in its checkpoints/). Throws
// DataError when there is none.
std::string find_checkpoint(const std::string& path);

CheckpointState read_checkpoint_state(const std::string& checkpoint);

enum class CheckpointParts { weights, everything };

// Reads the parts into the trainer's store; called by every rank. Throws DataError: a tensor that is missing, of
// another shape, not finite, or not in the model; missing optimizer state (and how to start from weights alone).
void load_checkpoint(const std::string& checkpoint, RankTrainer& trainer, CheckpointParts parts);

}  // namespace farspan
