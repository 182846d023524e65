// SPDX-License-Identifier: Apache-2.0
// How a context-parallel group is cut for a2a and a2a+p2p.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace farspan {

// Why `degree` ranks cannot trade tokens for these heads, with the degrees that work; nothing when they can. `heads`
// and `kv_heads` are the whole model's, `tp` the tensor-parallel size, which cuts them first (a rank keeps max(1,
// kv_heads / tp) key/value heads).
std::optional<std::string> refuse_a2a(int64_t heads, int64_t kv_heads, int64_t degree, int64_t tp = 1);

// The two levels of a2a+p2p; inner * outer = cp.
struct HierarchicalSizes {
  int inner = 1;  // neighbouring ranks that trade heads
  int outer = 1;  // groups between which keys travel
};

// `given`: hierarchical_context_parallel_sizes, [inner, outer], or empty: then inner is the largest divisor of cp below
// cp that the heads of one tensor-parallel rank allow and that is at most `most_inner` (the context-parallel ranks of
// one host where that is known, 8, the GPUs of the usual host, otherwise); cp itself where only that is left. Throws
// ConfigError when the given sizes are not two, their product is not cp, or the heads do not divide.
HierarchicalSizes hierarchical_sizes(std::span<const int64_t> given, int cp, int64_t heads, int64_t kv_heads,
                                     int64_t most_inner = 8);

// The context-parallel ranks of each group, ascending. Inner groups are runs of neighbours, [0, 1] [2, 3]; outer ones
// take one rank of each of these, [0, 2] [1, 3].
std::vector<std::vector<int>> inner_groups(HierarchicalSizes sizes);
std::vector<std::vector<int>> outer_groups(HierarchicalSizes sizes);

}  // namespace farspan
