// SPDX-License-Identifier: Apache-2.0
// Context-parallel attention: the row's tokens are cut over the ranks of a group; queries stay, keys and values travel.
//
//   p2p         K, V travel a ring: at hop h a rank attends to the chunks of rank (r - h) mod cp while the next ones
//               arrive. Two K, V buffers and one running state live, whatever cp is. Backward sends K, V round the same
//               ring; fp32 dK, dV follow one hop behind and end at their owner.
//               Received per rank: forward (cp-1) 2 s K D b; backward (cp-1) 2 s K D (b + 4) bytes a row.
//   all_gather  every rank gathers all K, V, attends, and in backward reduce-scatters fp32 dK, dV.
//               Received per rank: forward (cp-1) 2 s K D b; backward (cp-1) 2 s K D (b + 4) bytes a row.
//
// Partial results stay fp32 (ops/attention.h), so the rounding error does not grow with cp. Blocks that no query can
// see are not computed. Ring: Liu et al., Ring Attention (2023); fp32 state: this project. All-gather: Llama 3 (2024),
// section 3.3.2.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "config/config.h"
#include "device/device.h"
#include "memory/arena.h"
#include "parallel/interval_mask.h"
#include "parallel/sequence_layout.h"
#include "tensor/tensor.h"

namespace farspan {

// What attention needs to know about the rows of one micro-batch, as this rank sees them.
struct BatchMask {
  std::vector<IntervalMask> rows;  // B
  Tensor lo;                       // (B, s) i64: visible keys of the local tokens, in row positions
  Tensor hi;                       // (B, s) i64
};

struct ContextAttentionShape {
  int64_t heads = 0;     // A
  int64_t kv_heads = 0;  // K
  int64_t head_dim = 0;  // D
  float scale = 1;
};

class ContextAttention {
 public:
  // `comm_type` must be p2p or all_gather (resolve automatic first: choose_cp_comm_type).
  ContextAttention(Communicator& cp, const SequenceLayout& layout, ContextAttentionShape shape, CpCommType comm_type);

  // query (B, s, A, D), key and value (B, s, K, D), f32 or bf16 with last stride 1 (views into a fused QKV are fine).
  // out (B, s, A, D) in the same dtype, lse (B, A, s) f32: both written.
  void forward(Device& device, Arena& arena, const BatchMask& mask, const Tensor& query, const Tensor& key,
               const Tensor& value, Tensor out, Tensor lse) const;

  // d_query, d_key, d_value: like query, key, value, and written (not added to), rounded once at the end.
  void backward(Device& device, Arena& arena, const BatchMask& mask, const Tensor& query, const Tensor& key,
                const Tensor& value, const Tensor& out, const Tensor& lse, const Tensor& d_out, Tensor d_query,
                Tensor d_key, Tensor d_value) const;

 private:
  Communicator& cp_;
  const SequenceLayout& layout_;
  ContextAttentionShape shape_;
  CpCommType comm_type_;
};

// Resolves `automatic`. all_gather when all of K, V is small beside a rank's activations, p2p otherwise; the rule and
// its numbers are in docs/decisions/.
CpCommType choose_cp_comm_type(CpCommType asked, const SequenceLayout& layout, const ContextAttentionShape& shape,
                               DType dtype);

}  // namespace farspan
