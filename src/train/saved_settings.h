// SPDX-License-Identifier: Apache-2.0
// The settings a checkpoint was made with, kept in its index: tensors of the right shape are not yet the same model
// (other heads, other rotary base), nor the same place in the data (other seed, other batch).
#pragma once

#include <map>
#include <string>

#include "config/config.h"

namespace farspan {

using SavedSettings = std::map<std::string, std::string>;  // "model.rotary_base" -> "10000"

SavedSettings settings_of(const Config& config);

enum class LoadUse {
  resume,    // go on training where the checkpoint ends
  weights,   // start training from its weights
  evaluate,  // evaluation and generation
};

// Throws DataError naming key, saved and present value where they may not differ: the model for every use (positions
// and window may change when training starts from weights); seed, batch and optimizer for resume. Other changes of a
// resumed run are logged, one line each.
void check_settings(const std::string& checkpoint, const SavedSettings& saved, const Config& config, LoadUse use);

}  // namespace farspan
