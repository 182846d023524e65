// SPDX-License-Identifier: Apache-2.0
#include "plan/machine.h"

#include <algorithm>
#include <array>

#include "base/math.h"
#include "device/device.h"
#include "train/record.h"

namespace farspan {
namespace {

// Rates of one core of a server CPU with AVX-512, as measured in docs/performance.md and rounded down. A plan is meant
// for comparing layouts; on another CPU the seconds scale, the ratios hold.
constexpr double kGemmFlopsPerCore = 140e9;       // oneDNN, f32
constexpr double kGemmFlopsPerCoreBf16 = 280e9;   // oneDNN, bf16
constexpr double kAttentionFlopsPerCore = 110e9;  // fp32 inside for either type
constexpr double kMemoryBandwidth = 20e9;         // whole machine, read plus written
constexpr double kNetworkBandwidth = 1.25e9;      // whole machine, received: 10 Gbit/s Ethernet, not measured

struct AttentionRates {
  double forward = 0;
  double backward = 0;
};

struct GpuRates {
  std::string_view name;
  double peak_flops_bf16 = 0;  // NVIDIA's data sheet, dense
  double gemm_flops_bf16 = 0;
  double gemm_flops_fp8 = 0;
  AttentionRates heads_of_64;  // bf16
  AttentionRates heads_of_128;
  AttentionRates heads_of_256;
  double peak_flops_fp32 = 0;
  double gemm_flops_fp32 = 0;
  double attention_flops_fp32 = 0;
  double copy_bandwidth = 0;
  double host_bandwidth = 0;
  double link_bandwidth = 0;     // to a GPU of the same machine
  double network_bandwidth = 0;  // a GPU's share
};

// In bf16 what a GPU keeps up for seconds, its power being what limits it; measured on one H200 of 700 W, bursts of
// milliseconds are up to a fifth faster. The link: what NCCL brings a rank of two in exchanges of 64 to 256 MiB (268 to
// 303 GB/s of NVLink's 450). fp32 and network rates were not measured: most of what plain fp32 instructions can do, and
// a 400 Gbit/s adapter for each GPU.
constexpr std::array kGpus = {
    GpuRates{.name = "NVIDIA H200",
             .peak_flops_bf16 = 989e12,
             .gemm_flops_bf16 = 640e12,
             .gemm_flops_fp8 = 1080e12,
             .heads_of_64 = {.forward = 490e12, .backward = 425e12},
             .heads_of_128 = {.forward = 590e12, .backward = 520e12},
             .heads_of_256 = {.forward = 640e12, .backward = 470e12},
             .peak_flops_fp32 = 67e12,
             .gemm_flops_fp32 = 50e12,
             .attention_flops_fp32 = 20e12,
             .copy_bandwidth = 4270e9,
             .host_bandwidth = 55e9,
             .link_bandwidth = 300e9,
             .network_bandwidth = 50e9},
};

// Of a pair, forward 4 and backward 10 FLOPs for each of the head's channels.
double both_ways(const AttentionRates& rates) { return 14 / (4 / rates.forward + 10 / rates.backward); }

}  // namespace

Machine cpu_machine(Precision precision, int cores, int64_t ranks) {
  const double cores_per_rank = static_cast<double>(cores) / static_cast<double>(std::max<int64_t>(1, ranks));
  Machine machine;
  machine.name = "cpu";
  machine.gemm_flops = cores_per_rank * (precision == Precision::fp32 ? kGemmFlopsPerCore : kGemmFlopsPerCoreBf16);
  machine.fp8_gemm_flops = cores_per_rank * kGemmFlopsPerCore;  // widened to f32
  machine.attention_flops = cores_per_rank * kAttentionFlopsPerCore;
  machine.attention_forward_flops = machine.attention_flops;
  machine.attention_backward_flops = machine.attention_flops;
  machine.memory_bandwidth = kMemoryBandwidth / static_cast<double>(std::max<int64_t>(1, ranks));
  machine.link_bandwidth = machine.memory_bandwidth / 2;  // a copy reads and writes each byte
  machine.network_bandwidth = kNetworkBandwidth / static_cast<double>(std::max<int64_t>(1, ranks));
  return machine;
}

Machine gpu_machine(std::string_view name, Precision precision, int64_t head_size, int64_t ranks_per_gpu) {
  const auto found = std::find_if(kGpus.begin(), kGpus.end(), [&](const GpuRates& gpu) { return gpu.name == name; });
  const bool known = found != kGpus.end();
  const GpuRates& gpu = known ? *found : kGpus.front();
  const double share = 1.0 / static_cast<double>(std::max<int64_t>(1, ranks_per_gpu));
  const bool fp32 = precision == Precision::fp32;
  AttentionRates attention = head_size <= 64 ? gpu.heads_of_64 : head_size <= 128 ? gpu.heads_of_128 : gpu.heads_of_256;
  if (fp32) attention = {.forward = gpu.attention_flops_fp32, .backward = gpu.attention_flops_fp32};
  Machine machine;
  machine.name = name.empty() ? std::string(gpu.name) : std::string(name);
  machine.gemm_flops = share * (fp32 ? gpu.gemm_flops_fp32 : gpu.gemm_flops_bf16);
  machine.fp8_gemm_flops = share * gpu.gemm_flops_fp8;
  machine.attention_flops = share * both_ways(attention);
  machine.attention_forward_flops = share * attention.forward;
  machine.attention_backward_flops = share * attention.backward;
  machine.memory_bandwidth = share * gpu.copy_bandwidth;
  machine.link_bandwidth = ranks_per_gpu > 1 ? machine.memory_bandwidth / 2 : gpu.link_bandwidth;
  machine.network_bandwidth = share * gpu.network_bandwidth;
  machine.host_bandwidth = share * gpu.host_bandwidth;
  if (known) machine.peak_flops = share * (fp32 ? gpu.peak_flops_fp32 : gpu.peak_flops_bf16);
  return machine;
}

Machine machine_for(const Config& config, int64_t ranks) {
  if (device_kind(config) == DeviceKind::cpu) return cpu_machine(config.training.precision, usable_cores(), ranks);
  const std::string name = cuda_device_count() > 0 ? cuda_device_name(0) : std::string(kGpus.front().name);
  const int64_t ranks_per_gpu = ceil_div(ranks, int64_t{devices_of_machine(config, static_cast<int>(ranks))});
  return gpu_machine(name, config.training.precision, config.model.kv_channels, ranks_per_gpu);
}

Ceilings ceilings_of(const Machine& machine) {
  return {.machine = machine.name,
          .gemm_flops = machine.gemm_flops,
          .fp8_gemm_flops = machine.fp8_gemm_flops,
          .attention_forward_flops = machine.attention_forward_flops,
          .attention_backward_flops = machine.attention_backward_flops,
          .memory_bandwidth = machine.memory_bandwidth,
          .peak_flops = machine.peak_flops};
}

}  // namespace farspan
