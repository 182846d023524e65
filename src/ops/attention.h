// SPDX-License-Identifier: Apache-2.0
// Block attention: the one kernel contract on which every context-parallel schedule stands.
//
// A block pairs a span of queries with a span of keys that are consecutive in the row. Query i of a block sees exactly
// the keys whose position p satisfies lo[i] <= p < hi[i]; key j of the block has position key_begin + j. Causal, full,
// window, packed documents, prefix and padding (lo >= hi: sees nothing) are all this.
//
// Forward keeps a running state per query and head: `out`, the fp32 softmax-weighted mean over the keys seen so far,
// and `lse`, the fp32 log of the sum of exponentials. Attending to one more block updates both as if all keys had been
// seen at once, so nothing is rounded to a shorter type between blocks. Start from out = 0, lse = -inf
// (attention_state_init), or let the first block begin the state (StateUse::begin).
//
//   s_ij = scale * <q_i, k_j>;   lse' = log(exp(lse) + sum_j exp(s_ij));   out' = (exp(lse) out + sum_j exp(s_ij) v_j)
//   / exp(lse')
//
// Backward needs the final lse and delta_i = <d_out_i, out_i> and adds this block's share to fp32 d_q, d_k, d_v:
//
//   p_ij = exp(s_ij - lse_i);  d_v_j += sum_i p_ij d_out_i;  ds_ij = p_ij (<d_out_i, v_j> - delta_i)
//   d_q_i += scale sum_j ds_ij k_j;   d_k_j += scale sum_i ds_ij q_i
//
// Sources: Dao et al., FlashAttention (2022), algorithms 1 and 4; Dao, FlashAttention-2 (2023), section 3.
//
// Masked pairs are skipped by selection, never multiplied by zero: whatever a forbidden key, value, query or gradient
// holds (NaN included), it changes no bit of an output that may not see it.
// Grouped queries: query head a reads key/value head a / (A / K). Any head size D on the CPU, where those above 256 run
// on the much slower reference; up to 256 on a GPU. The same bits every time, on the CPU for any number of threads.
// cuDNN, which takes plain and causal bf16 blocks on a GPU, is an exception to each of these:
// ops/cudnn/attention_cudnn.h. Calls throw InternalError, naming the tensor, when shapes, types or strides do not fit
// together.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "device/device.h"
#include "ops/accumulate.h"
#include "ops/visible_run.h"
#include "tensor/tensor.h"

namespace farspan {

// Dropout on the attention probabilities, keyed by where a pair stands in the row and not by who computes it: the draw
// of (row, head, query position, key position) is the same on any layout, in recomputation and in backward. A dropped
// pair adds nothing to out, a kept one exp(s_ij) / (1 - probability); lse counts all pairs, so it is as without
// dropout. With m_ij = 0 or 1 / (1 - probability), and delta_i = <d_out_i, out_i> as ever:
//
//   out_i = sum_j m_ij p_ij v_j;   d_v_j += sum_i m_ij p_ij d_out_i;   ds_ij = p_ij (m_ij <d_out_i, v_j> - delta_i)
//
// Draws are 32-bit words of Philox4x32-10 (base/philox.h), dropped below probability * 2^32. Four neighbouring key
// positions share a block of draws, so that kernels may make them in vectors; where a block of keys begins changes
// nothing:
//
//   head_key = words 0 (lower half) and 1 (upper half) of Philox(key, row).block(first_head + a)
//   draw(i, j) = Philox(head_key, query position of i).block(key position of j / 4)[key position of j % 4]
//
// Positions are at least 0. A dropped pair is still one that the query sees: NaN in its value may reach the output.
struct AttentionDropout {
  double probability = 0;  // 0: none
  uint64_t key = 0;        // of the run, step and layer (ops/dropout.h: dropout_key)
  int64_t row = 0;         // number of the row in the data
  int64_t first_head = 0;  // number in the model of the block's query head 0
};

struct AttentionBlock {
  Tensor query;                // (n, A, D) f32 or bf16; last stride 1
  Tensor key;                  // (m, K, D) same dtype
  Tensor value;                // (m, K, D) same dtype
  Tensor lo;                   // (n) i64, row positions
  Tensor hi;                   // (n) i64
  int64_t key_begin = 0;       // row position of key 0
  int64_t query_begin = 0;     // row position of query 0, the others follow; read by dropout only
  float scale = 1;             // usually 1 / sqrt(D)
  int64_t visible_pairs = -1;  // (query, key) pairs of this block, for the cost; -1: count them as n * m
  // The same as lo and hi, in the CPU's memory: ascending, all n queries. Empty: unknown. From it a GPU's code learns,
  // without waiting for the device, which blocks are plain or causal and where one document ends.
  std::span<const VisibleRun> runs = {};
  AttentionDropout dropout = {};
  // Queries that see no key of this block keep what out, lse and d_query hold, also where the block begins these: other
  // blocks do.
  bool keeps_blind = false;
};

// What the running state holds before a block.
enum class StateUse {
  add,   // what earlier blocks left there, which this one is added to
  begin  // nothing of worth: written as if it had been out = 0, lse = -inf
};

// True where results that one block completes may be written in the query's dtype, rounded once, instead of fp32: out
// with StateUse::begin, gradients with Accumulate::no. CUDA; on the CPU they are fp32.
bool attention_writes_rounded(const Device& device);

// out = 0, lse = -inf.  out (n, A, D) f32, lse (A, n) f32.
void attention_state_init(Device& device, Tensor out, Tensor lse);

// Adds one block to the running state, or begins it. out (n, A, D) f32, see attention_writes_rounded; lse (A, n) f32
// (last stride 1).
void attention_block_forward(Device& device, const AttentionBlock& block, StateUse use, Tensor out, Tensor lse);

// delta (A, n) f32 = row sums of d_out * out.  out and d_out (n, A, D), f32 or bf16 each.
void attention_delta(Device& device, const Tensor& out, const Tensor& d_out, Tensor delta);

// Whether attention_block_backward will read delta for this block; where it will not, making delta is wasted. A dry
// device that stands for a GPU does not know who attends there: in fp32 kernels that read it, in bf16 mostly those that
// do not.
bool attention_reads_delta(const Device& device, const AttentionBlock& block);

// One block's gradients, added to d_query, d_key, d_value or, with Accumulate::no, written over whatever they held.
// d_out (n, A, D) in the query's dtype; lse, delta (A, n) f32, final values of all blocks; d_query (n, A, D), d_key and
// d_value (m, K, D) f32, see attention_writes_rounded. `out`: the final output (n, A, D) in the query's dtype, for
// implementations that need it; undefined where the caller has none. With it on a CUDA device, `delta` may be
// undefined.
void attention_block_backward(Device& device, const AttentionBlock& block, const Tensor& out, const Tensor& d_out,
                              const Tensor& lse, const Tensor& delta, Accumulate d_query_use,
                              Accumulate d_key_value_use, Tensor d_query, Tensor d_key, Tensor d_value);

// On the dry device: scratch for any block with fp32 results that is as large as this one at most. For callers that
// record some blocks and may run others.
void attention_plan_scratch(Device& device, const AttentionBlock& largest);

// The implementations in the order they are tried; the first that does not decline runs. FARSPAN_VERBOSE=1 in the
// environment prints which ran and why others declined.
std::vector<std::string> attention_implementations(DeviceKind kind = DeviceKind::cpu);

}  // namespace farspan
