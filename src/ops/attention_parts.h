// SPDX-License-Identifier: Apache-2.0
// What AttentionBlock::runs says about a block, worked out on the CPU: into which parts it falls, and which of them are
// plain or causal. A row of packed documents, for instance, falls into one causal part for each document.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/visible_run.h"

namespace farspan {

enum class PartForm {
  nothing,  // no query sees a key
  plain,    // all see all
  causal,   // query i sees the first min(keys, first_keys + i)
  other
};

// Queries [query_begin, query_end) of a block and keys [key_begin, key_end) of it, such that these queries see no other
// keys of the block and no other queries see these keys.
struct AttentionPart {
  int64_t query_begin = 0;
  int64_t query_end = 0;
  int64_t key_begin = 0;
  int64_t key_end = 0;
  PartForm form = PartForm::nothing;
  int64_t first_keys = 0;        // causal: at least 1
  int64_t pairs = 0;             // visible
  std::vector<VisibleRun> runs;  // the block's, cut to these queries and counted from query_begin; row positions

  int64_t queries() const { return query_end - query_begin; }
  int64_t keys() const { return key_end - key_begin; }
};

// The parts of a block of keys [key_begin, key_begin + keys) (row positions), both queries and keys ascending. Every
// query is in one part; keys that nobody sees may be in none.
std::vector<AttentionPart> attention_parts(std::span<const VisibleRun> runs, int64_t key_begin, int64_t keys);

// Neighbouring parts as one, of form `other` if it has pairs.
AttentionPart join(const AttentionPart& a, const AttentionPart& b);

}  // namespace farspan
