// SPDX-License-Identifier: Apache-2.0
// What a plan assumes about the machine, and what a profile's shares are of. Rates are of one rank: a CPU's are shared
// by the ranks on it, a GPU's by the ranks that compute on it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "config/config.h"
#include "observe/step_profile.h"

namespace farspan {

struct Machine {
  std::string name;
  double gemm_flops = 0;               // per second and rank
  double fp8_gemm_flops = 0;           // of 8-bit operands
  double attention_flops = 0;          // on visible pairs: a forward and its backward together
  double attention_forward_flops = 0;  // the two apart
  double attention_backward_flops = 0;
  double memory_bandwidth = 0;   // bytes per second and rank, read plus written
  double link_bandwidth = 0;     // bytes per second that one rank receives
  double network_bandwidth = 0;  // the same, from a rank on another machine
  double host_bandwidth = 0;     // of a GPU: between its memory and the host's, each way; 0: no such copy
  double peak_flops = 0;         // what MFU divides by; 0: unknown
};

// A CPU of this kind with `cores` cores shared by its `ranks` ranks, as is its network link.
Machine cpu_machine(Precision precision, int cores, int64_t ranks);

// A machine of GPUs, `name` being CUDA's for them; `ranks_per_gpu` share each. `head_size` decides attention's rates.
// Of a name that is not known, or empty: an H200's rates, and no peak.
Machine gpu_machine(std::string_view name, Precision precision, int64_t head_size, int64_t ranks_per_gpu);

// The machine that `ranks` ranks on one host run on: this one, or, for GPUs where it has none, one of H200s with a GPU
// for each rank. `config` is resolved.
Machine machine_for(const Config& config, int64_t ranks);

Ceilings ceilings_of(const Machine& machine);

}  // namespace farspan
