// SPDX-License-Identifier: Apache-2.0
// Which part of the model the ranks of a pipeline stage and a tensor-parallel place hold: a function of the settings
// alone, so that any rank can tell what any other holds.
#pragma once

#include <vector>

#include "config/config.h"
#include "model/parameters.h"
#include "model/transformer.h"

namespace farspan {

// The model chunks of a stage, in order.
std::vector<ModelChunk> chunks_of_stage(const Config& config, const ResolvedSizes& sizes, int stage);

ModelShare model_share(const Config& config, const ResolvedSizes& sizes, int stage, int tensor_rank);

}  // namespace farspan
