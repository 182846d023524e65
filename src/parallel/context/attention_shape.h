// SPDX-License-Identifier: Apache-2.0
// The sizes and options of context-parallel attention that are fixed for a run.
#pragma once

#include <cstdint>

#include "ops/pass.h"

namespace farspan {

struct ContextAttentionShape {
  int64_t heads = 0;     // A
  int64_t kv_heads = 0;  // K
  int64_t head_dim = 0;  // D
  float scale = 1;
  int64_t first_head = 0;  // number in the model of query head 0 here; read by dropout only
};

struct AllGatherOptions {
  // Bytes that one pass's communication buffers may take; as many key/value heads are gathered at a time as fit, but at
  // least one. 0: what attention's backward holds anyway (query, out, d_out, and the fp32 gradient of the query), so
  // that the gather does not set the peak.
  int64_t buffer_size = 0;
  bool overlap = true;  // the next heads travel while these are attended to; false: gather, then attend
};

}  // namespace farspan
