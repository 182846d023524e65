// SPDX-License-Identifier: Apache-2.0
// What a plan assumes about the machine. Rates are of one rank that has `cores_per_rank` cores to itself.
#pragma once

#include <cstdint>
#include <string>

#include "config/config.h"

namespace farspan {

struct Machine {
  std::string name;
  double gemm_flops = 0;         // per second and rank
  double attention_flops = 0;    // per second and rank, on visible pairs
  double memory_bandwidth = 0;   // bytes per second and rank
  double link_bandwidth = 0;     // bytes per second that one rank receives
  double network_bandwidth = 0;  // the same, from a rank on another machine
  double peak_flops = 0;         // what MFU divides by; 0: unknown
};

// A CPU of this kind with `cores` cores shared by its `ranks` ranks, as is its network link.
Machine cpu_machine(Precision precision, int cores, int64_t ranks);

}  // namespace farspan
