// SPDX-License-Identifier: Apache-2.0
#include "plan/machine.h"

#include <algorithm>

namespace farspan {
namespace {

// Rates of one core of a server CPU with AVX-512, as measured in docs/performance.md and rounded down. A plan is meant
// for comparing layouts; on another CPU the seconds scale, the ratios hold.
constexpr double kGemmFlopsPerCore = 140e9;       // oneDNN, f32
constexpr double kGemmFlopsPerCoreBf16 = 280e9;   // oneDNN, bf16
constexpr double kAttentionFlopsPerCore = 110e9;  // fp32 inside for either type
constexpr double kMemoryBandwidth = 20e9;         // whole machine, read plus written
constexpr double kNetworkBandwidth = 1.25e9;      // whole machine, received: 10 Gbit/s Ethernet, not measured

}  // namespace

Machine cpu_machine(Precision precision, int cores, int64_t ranks) {
  const double cores_per_rank = static_cast<double>(cores) / static_cast<double>(std::max<int64_t>(1, ranks));
  Machine machine;
  machine.name = "cpu";
  machine.gemm_flops = cores_per_rank * (precision == Precision::fp32 ? kGemmFlopsPerCore : kGemmFlopsPerCoreBf16);
  machine.attention_flops = cores_per_rank * kAttentionFlopsPerCore;
  machine.memory_bandwidth = kMemoryBandwidth / static_cast<double>(std::max<int64_t>(1, ranks));
  machine.link_bandwidth = machine.memory_bandwidth / 2;  // a copy reads and writes each byte
  machine.network_bandwidth = kNetworkBandwidth / static_cast<double>(std::max<int64_t>(1, ranks));
  return machine;
}

}  // namespace farspan
