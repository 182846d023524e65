// SPDX-License-Identifier: Apache-2.0
// cp_comm_type auto: what each communication type would cost, and which is taken. A pure function of sizes and rates,
// so every rank, and the planner, come to the same answer. The model and its numbers:
// docs/decisions/0003-cp-comm-type.md.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "config/config.h"
#include "device/device.h"
#include "parallel/context/attention_shape.h"
#include "parallel/context/hierarchy.h"
#include "parallel/context/key_schedule.h"
#include "parallel/sequence_layout.h"
#include "tensor/dtype.h"

namespace farspan {

// What one rank does in a second, and what is assumed of the mask. The defaults are a CPU core's, as
// docs/performance.md has them.
struct CpRates {
  PieceRule pieces = kPiecesOnCpu;  // of p2p
  double attention_flops = 110e9;   // on visible pairs
  double link_bandwidth = 5e9;      // bytes that it receives
  double memory_bandwidth = 10e9;   // bytes that it reads and writes
  double meeting_seconds = 20e-6;   // one exchange, however short
  double visible_share = 0.5;       // visible pairs of all S * S; 1/2: causal, one document
};

// Those of ranks that compute on `device` in `dtype`, of which `ranks` exchange: on GPUs an H200's, and between them
// NVLink where they may be of one host, else a network adapter for each.
CpRates cp_rates(DeviceKind device, DType dtype, int64_t ranks);

// Seconds of `transfer` that `attention` over `ranks` ranks' keys does not hide. Parcels of `steps` steps arrive one
// after the other: the first behind the blocks of the rank's own keys, each other one behind those of the one before.
double exposed_arrivals(double transfer, double attention, int ranks, double steps);

// Per row and layer, forward and backward.
struct CpCost {
  CpCommType type = CpCommType::p2p;
  std::optional<std::string> refused;  // why this type cannot be used; the rest is then 0
  double received_bytes = 0;           // by the rank that receives most
  double attention_seconds = 0;        // the same for all types
  double exposed_seconds = 0;          // communication that no attention hides, and copies for it
  double working_bytes = 0;            // held in backward beyond the call's own inputs and outputs
  double seconds() const { return attention_seconds + exposed_seconds; }
};

// p2p, all_gather, a2a, a2a+p2p. cp of `layout` is at least 2.
std::array<CpCost, 4> cp_costs(const SequenceLayout& layout, const ContextAttentionShape& shape, DType dtype,
                               HierarchicalSizes sizes, const CpRates& rates = {});

// Resolves `automatic`; any other type is returned as it is. Among the types within 1 % of the least seconds, those
// that hold the fewest bytes (memory decides whether a long row runs at all), and among these, within 10 %, the one
// with the least seconds. `hierarchical`: as given in the configuration, or empty (hierarchical_sizes).
CpCommType choose_cp_comm_type(CpCommType asked, const SequenceLayout& layout, const ContextAttentionShape& shape,
                               DType dtype, std::span<const int64_t> hierarchical = {}, const CpRates& rates = {});

}  // namespace farspan
