// SPDX-License-Identifier: Apache-2.0
// Context-parallel attention: the row's tokens are cut over the ranks of a group.
//
//   p2p         Queries stay; keys and values travel. At hop h a rank receives straight from rank r - h those keys that
//               its queries see and sends rank r + h those of its own that are seen there, a piece at a time, while the
//               piece before is attended to. Backward sends the same keys again, and their fp32 gradients back to the
//               owner. Three piece buffers and one running state live, whatever cp is.
//   all_gather  The same keys from all ranks at once, some key/value heads at a time so that the buffers stay bounded.
//   a2a         Tokens are traded for heads (Ulysses): each rank attends over whole rows for A/cp heads.
//   a2a+p2p     a2a inside groups of `inner` neighbouring ranks, p2p between the groups.
//
// Partial results stay fp32 (ops/attention.h), so the rounding error does not grow with cp. Blocks that no query can
// see are neither sent nor computed.
//
// Bytes that a rank receives per row, with b = bytes of an element, K, A, D, s as ever, and
//   N_r = other ranks' tokens that rank r's queries see, M_r = visits of others to r's tokens (sum over r: the same)
//
//   p2p, all_gather   forward   2 K D b N_r
//                     backward  2 K D b N_r + 8 K D M_r
//   N = (cp - 1) s where all see all. Under causal zigzag N_r = (cp - 1 - r/2) s (first ranks more, last ranks less), a
//   mean of 3/4 (cp - 1) s. For documents that stay on one rank N = 0.
//
//   a2a, n = cp       forward   (n-1) s [(2 A/n + 2 K') D b + 4 A/n]          q, k, v in; out, lse back
//                     backward  (n-1) s [(3 A/n + 2 K') D b + 8 A/n + 2 K' D w]
//   q, k, v, d_out, lse, delta in (they are moved again rather than kept); d_q, d_k, d_v back. K' = max(1, K/n)
//   key/value heads on a rank; w = b, or 4 where n > K: shared heads' gradients are summed in fp32. On a GPU in bf16
//   out is moved instead of delta: backward (n-1) s [(4 A/n + 2 K') D b + 4 A/n + 2 K' D w]. a2a+p2p: a2a with n =
//   inner, and p2p over outer ranks with s' = n s tokens and K' heads.
//
// Ring: Liu et al., Ring Attention (2023). All-gather: Llama 3 (2024), section 3.3.2. a2a: Jacobs et al., DeepSpeed
// Ulysses (2023). Both levels: Fang and Zhao, USP (2024). fp32 state, sending only what is seen: this project.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "config/config.h"
#include "device/device.h"
#include "memory/arena.h"
#include "ops/attention.h"
#include "parallel/context/attention_shape.h"
#include "parallel/interval_mask.h"
#include "parallel/sequence_layout.h"
#include "tensor/tensor.h"

namespace farspan {

// What attention needs to know about the rows of one micro-batch, as this rank sees them.
struct BatchMask {
  std::vector<IntervalMask> rows;  // (B)
  std::vector<RowLayout> layouts;  // (B)
  std::vector<int64_t> row_ids;    // (B): numbers of the rows in the data; read by dropout only
  Tensor lo;                       // (B, s) i64: visible keys of the local tokens, in row positions
  Tensor hi;                       // (B, s) i64
};

// The communicators of one rank. `inner` and `outer` are for a2a+p2p alone (parallel/context/hierarchy.h lists their
// ranks); like `cp` they are of Dimension::cp, so that their bytes are counted with it.
struct ContextGroups {
  Communicator* cp = nullptr;
  Communicator* inner = nullptr;
  Communicator* outer = nullptr;
};

struct AttentionCall;
struct KeySchedule;
struct OutputGradient;

class RecordedCalls;

class ContextAttention {
 public:
  // `comm_type` is not automatic (choose_cp_comm_type resolves it). `recorded`: of a dry device, for this alone. Throws
  // ConfigError when the heads do not divide as the type needs.
  ContextAttention(const ContextGroups& groups, const SequenceLayout& layout, ContextAttentionShape shape,
                   CpCommType comm_type, AllGatherOptions all_gather = {}, RecordedCalls* recorded = nullptr);

  // query (B, s, A, D), key and value (B, s, K, D), f32 or bf16 with last stride 1 (views into a fused QKV are fine).
  // out (B, s, A, D) in the same dtype, lse (B, A, s) f32: both written. Of `dropout`, probability and key are read.
  void forward(Device& device, Arena& arena, const BatchMask& mask, const AttentionDropout& dropout,
               const Tensor& query, const Tensor& key, const Tensor& value, Tensor out, Tensor lse) const;

  // d_query, d_key, d_value: like query, key, value, and written (not added to), rounded once at the end.
  void backward(Device& device, Arena& arena, const BatchMask& mask, const AttentionDropout& dropout,
                const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse,
                const Tensor& d_out, Tensor d_query, Tensor d_key, Tensor d_value) const;

  CpCommType comm_type() const { return comm_type_; }

 private:
  struct Inputs;
  struct Gradients;
  void check(const Inputs& x) const;
  // Without and with trading tokens for heads first.
  void forward_own_heads(const Inputs& x, const Tensor& out, const Tensor& lse) const;
  void forward_traded_heads(const Inputs& x, const Tensor& out, const Tensor& lse) const;
  void run_backward_pass(const Inputs& x, const Gradients& d, const Tensor& lse) const;
  Buffer room_for_delta(const Inputs& x, OutputGradient& gradient) const;
  void backward_own_heads(const Inputs& x, const Gradients& d, const Tensor& lse, const Tensor& delta) const;
  void backward_traded_heads(const Inputs& x, const Gradients& d, const Tensor& lse, Buffer delta) const;
  // Whether each result is written once and in the caller's dtype, without a running state or a sum: on a device that
  // can, where one rank has all keys of its heads.
  bool writes_results(const Device& device) const;
  KeySchedule schedule_of(const AttentionCall& call, Pass pass) const;

  ContextGroups groups_;
  const SequenceLayout& layout_;
  ContextAttentionShape shape_;
  CpCommType comm_type_;
  AllGatherOptions all_gather_;
  Communicator* head_group_ = nullptr;  // among whose ranks heads are traded; null: none are
  Communicator* key_group_ = nullptr;   // among whose ranks keys travel; null: none do
  RecordedCalls* recorded_ = nullptr;   // null: every call is run
};

}  // namespace farspan
