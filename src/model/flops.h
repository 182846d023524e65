// SPDX-License-Identifier: Apache-2.0
// Model FLOPs: the work the model defines, recomputation not counted.
//
//   6 N tokens + 12 pairs A D
//
// N: matmul parameters, the output projection included (a tied embedding counts once); pairs: visible (query, key)
// pairs, summed over the layers. Forward is a third of it. MFU divides by the device's peak.
#pragma once

#include "config/config.h"

namespace farspan {

int64_t matmul_parameters(const ModelConfig& config);

double model_flops(const ModelConfig& config, int64_t tokens, int64_t layer_pairs);

}  // namespace farspan
