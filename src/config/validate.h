// SPDX-License-Identifier: Apache-2.0
// What fits together: the one validator for files, flags and programs that build a Config. Everything wrong with a
// configuration is said in one ConfigError before any data is opened, each reason with the value found and one that
// works; what is legal but poor comes back as warnings.
#pragma once

#include <string>

#include "config/config.h"

namespace farspan {

enum class ResolveScope {
  run,   // all keys; features not in this version are refused
  grid,  // the parallel section alone, as far as it needs no model
};

// Fills in every field whose 0 means "derived" and marks its origin "derived". vocab_size 0 stays (the tokenizer knows
// it; fill it in and resolve again, which then fills loss_tile_tokens too). Resolving twice changes nothing.
//
// Throws one ConfigError that lists every reason. The warnings are those of scope run.
ResolvedSizes resolve(Config& config, int world_size, ResolveScope scope = ResolveScope::run);

// The ranks to start: `ranks` where given (not 0), else the product of the tensor-, context- and pipeline-parallel
// sizes. Throws ConfigError: negative, or more than kMostRanks.
inline constexpr int kMostRanks = 65536;
int world_size(const Config& config, int64_t ranks);

}  // namespace farspan
