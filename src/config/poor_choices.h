// SPDX-License-Identifier: Apache-2.0
// Choices that are legal but poor, or that have no effect: one line each, with the predicted cost and what would do
// better. They change nothing; the program prints them.
#pragma once

#include <string>
#include <vector>

#include "config/config.h"
#include "config/hosts.h"

namespace farspan {

// `config` is resolved and `sizes` are its. The predictions, with n ranks in a group:
//   pipeline idle share    (pp - 1) / (chunks * micro_batches + pp - 1)     Narayanan et al., 2021, section 2.2
//   short context chunks   (c + 300) / c times the attention time, c tokens a chunk: on the CPU kernels blocks of 300
//                          tokens run at half the rate of long ones (docs/performance.md)
//   ZeRO 3                 weights received twice a micro-batch, 2 m (n - 1) / n W bytes, where ZeRO 2 receives W once
std::vector<std::string> poor_choices(const Config& config, const ResolvedSizes& sizes);

// Where the machines are known: tensor-parallel groups that do not lie within one.
std::vector<std::string> poor_placement(const ParallelConfig& parallel, const ResolvedSizes& sizes,
                                        const HostMap& hosts);

}  // namespace farspan
