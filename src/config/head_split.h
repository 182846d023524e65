// SPDX-License-Identifier: Apache-2.0
// By how many ranks a model's heads can be cut: for tensor parallelism, and for the all-to-all of context parallelism
// (Ulysses; Jacobs et al., DeepSpeed Ulysses, 2023).
//
// Each rank gets an equal run of query heads, and the key/value heads that these use. Query heads use key/value heads
// in equal consecutive groups, so the runs fit the groups when one rank holds whole groups, or several ranks share one:
//
//   heads % ranks == 0  and  (kv_heads % ranks == 0  or  ranks % kv_heads == 0)
//
// In the second case a key/value head is on ranks / kv_heads ranks, and its gradient is the sum of theirs. Other
// numbers would have ranks hold unequal numbers of key/value heads, or use them for unequal numbers of queries.
#pragma once

#include <cstdint>
#include <vector>

namespace farspan {

// All counts at least 1, heads a multiple of kv_heads.
bool splits_heads(int64_t heads, int64_t kv_heads, int64_t ranks);

// Every number of ranks that fits, ascending; 1 is always the first. With tensor parallelism, `heads` and `kv_heads`
// are those of one tensor-parallel rank: heads / tp and local_kv_heads.
std::vector<int64_t> a2a_degrees(int64_t heads, int64_t kv_heads);

// Key/value heads on each of `ranks` ranks: kv_heads / ranks, and 1 where ranks share a head.
int64_t local_kv_heads(int64_t kv_heads, int64_t ranks);

}  // namespace farspan
