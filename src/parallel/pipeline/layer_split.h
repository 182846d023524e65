// SPDX-License-Identifier: Apache-2.0
// Which layers a pipeline stage holds. The model's layers are cut into stages * chunks runs, the virtual stages; stage
// s holds virtual stages s, stages + s, 2 stages + s, ... as its chunks. Source: Narayanan et al., Efficient
// Large-Scale Language Model Training on GPU Clusters (2021), section 2.2.
#pragma once

#include <cstdint>
#include <vector>

#include "parallel/sequence_layout.h"

namespace farspan {

struct LayerSplit {
  int64_t layers = 0;
  int stages = 1;
  int chunks = 1;            // of each stage
  int64_t first_layers = 0;  // of the first stage in all; 0: an even share
  int64_t last_layers = 0;   // of the last stage in all; 0: an even share
};

// Layers of every virtual stage, in the model's order. Where shares are not even, earlier stages hold one layer more:
// the last one carries the head as well. A stage's layers are dealt to its chunks in the same way. Throws ConfigError
// where a virtual stage
// would get no layer, with sizes that work.
std::vector<Span> split_layers(const LayerSplit& split);

}  // namespace farspan
