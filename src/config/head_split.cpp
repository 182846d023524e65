// SPDX-License-Identifier: Apache-2.0
#include "config/head_split.h"

#include <algorithm>

namespace farspan {

bool splits_heads(int64_t heads, int64_t kv_heads, int64_t ranks) {
  return heads % ranks == 0 && (kv_heads % ranks == 0 || ranks % kv_heads == 0);
}

std::vector<int64_t> a2a_degrees(int64_t heads, int64_t kv_heads) {
  std::vector<int64_t> degrees;
  for (int64_t d = 1; d * d <= heads; ++d) {
    if (heads % d != 0) continue;
    if (splits_heads(heads, kv_heads, d)) degrees.push_back(d);
    if (d != heads / d && splits_heads(heads, kv_heads, heads / d)) degrees.push_back(heads / d);
  }
  std::sort(degrees.begin(), degrees.end());
  return degrees;
}

int64_t local_kv_heads(int64_t kv_heads, int64_t ranks) { return std::max<int64_t>(1, kv_heads / ranks); }

}  // namespace farspan
