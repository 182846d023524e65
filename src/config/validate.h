// SPDX-License-Identifier: Apache-2.0
// What fits together. Everything wrong with a configuration is said in one ConfigError before any data is opened, each
// reason with the value found and one that works.
#pragma once

#include <string>

#include "config/config.h"

namespace farspan {

enum class ResolveScope {
  run,   // all keys; features not in this version are refused
  grid,  // only what decides which rank is in which group: the parallel sizes and rank_order, of any size
};

// Fills in every field whose 0 means "derived" and marks its origin "derived". vocab_size 0 stays (the tokenizer knows
// it; fill it in and resolve again, which then fills loss_tile_tokens too). Resolving twice changes nothing.
//
// Throws one ConfigError that lists every reason.
ResolvedSizes resolve(Config& config, int world_size, ResolveScope scope = ResolveScope::run);

// The ranks to start: `ranks` where given (not 0), else the product of the tensor-, context- and pipeline-parallel
// sizes. Throws ConfigError: negative, or more than kMostRanks.
inline constexpr int kMostRanks = 65536;
int world_size(const Config& config, int64_t ranks);

}  // namespace farspan
