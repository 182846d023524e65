// SPDX-License-Identifier: Apache-2.0
// The rule behind cp_comm_type auto; reasons and numbers in docs/decisions/0003-cp-comm-type.md.
#include "parallel/context/context_attention.h"

namespace farspan {

CpCommType choose_cp_comm_type(CpCommType asked, const SequenceLayout& layout, const ContextAttentionShape& shape,
                               DType dtype) {
  if (asked != CpCommType::automatic) return asked;
  const int64_t element = size_of(dtype);
  // Per token of a rank: what the gather holds in backward, all ranks' keys and values with their fp32 gradients,
  const int64_t gathered = layout.cp() * 2 * shape.kv_heads * (element + 4);
  // and what attention's backward holds there anyway: query, out and d_out, and the fp32 gradient of the query.
  const int64_t held = shape.heads * (3 * element + 4);
  return gathered <= held ? CpCommType::all_gather : CpCommType::p2p;
}

}  // namespace farspan
