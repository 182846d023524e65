// SPDX-License-Identifier: Apache-2.0
// The pieces of the validator. Each adds a reason for everything that does not fit, so that the user hears all of it at
// once, and each reason has the value found and one that works.
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "config/config.h"
#include "config/reasons.h"

namespace farspan {

// Any one size or count. Row positions are stored in 32 bits where a token is, and products of two sizes stay in 64.
inline constexpr int64_t kLargestSize = std::numeric_limits<int32_t>::max();

// --- Single values. ---

// False, with a reason, below `least` and above kLargestSize.
bool size_fits(std::string_view name, int64_t value, int64_t least, Reasons& reasons);
void check_not_negative(std::string_view name, double value, Reasons& reasons);
void check_positive(std::string_view name, double value, Reasons& reasons);
// In [0, 1); `works` is an example.
void check_fraction(std::string_view name, double value, std::string_view works, Reasons& reasons);

// --- What would work instead. ---

// The multiples just below (where above 0) and just above `value`.
std::vector<int64_t> multiples_near(int64_t value, int64_t multiple);
// All divisors, ascending.
std::vector<int64_t> divisors_of(int64_t number);
// The few of `fitting` that are nearest to `wanted`, ascending.
std::vector<int64_t> nearest(std::vector<int64_t> fitting, int64_t wanted);
std::vector<int64_t> divisors_near(int64_t number, int64_t wanted);

// --- Sections. ---

// Everything that can be said of the parallel section without a model. Gives the world and data-parallel size.
ResolvedSizes check_grid(const ParallelConfig& parallel, int world, Reasons& reasons);

void check_model(const Config& config, Reasons& reasons);

// The model over the grid: heads and widths over tensor-parallel ranks, layers over stages, heads over the all-to-all.
// Gives sizes.pipeline_chunks.
void check_model_over_grid(const Config& config, ResolvedSizes& sizes, Reasons& reasons);

// Data, steps, batches, optimizer, memory, communication and output. Gives sizes.micro_batches.
void check_run(const Config& config, ResolvedSizes& sizes, Reasons& reasons);

// --- What several of them need. ---

int64_t kv_heads_of(const ModelConfig& model);         // num_query_groups, or what it is derived from
int64_t ffn_hidden_size_of(const ModelConfig& model);  // likewise
bool uses_comm_type(const ParallelConfig& parallel, CpCommType type);

// The sizes of a2a+p2p when none are given: the largest all-to-all of at most 8 ranks (a machine's, as a rule) that
// fits the heads and leaves a second level, else one level of all ranks. Empty when the heads allow neither.
std::vector<int64_t> derived_hierarchical_sizes(const Config& config);

}  // namespace farspan
