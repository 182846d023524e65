// SPDX-License-Identifier: Apache-2.0
// Bytes of Device::scratch that attention on a CUDA device may use, and how cuDNN's calls are cut so that they stay
// within them. From sizes alone, and for whichever implementation takes the block: memory is planned where there may be
// no GPU.
//
// What cuDNN's graphs ask for was read from cuDNN 9.14 (n queries, m keys, a query heads, D head size; workspaces are
// checked against these bounds when a graph is made):
//
//   forward   256 bytes; a batch of documents 256 a document
//   backward  4 n a (D + 1), and 4 m a D where key/value heads are shared
//
// 4 n a D is the fp32 sum of d_query. Backward takes some key/value heads and their query heads at a time, as many as
// keep a call below a limit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/attention_implementation.h"
#include "ops/cuda/attention_choice.h"
#include "ops/cuda/attention_kernels_scratch.h"
#include "ops/cuda/scratch.h"

namespace farspan::cuda {

// Limit of a backward call's scratch: all heads of 8192 tokens of 16:8 heads of 128 fit, and half of 32768's. Fewer
// heads a call cost nothing: 523 TFLOP/s with all and 524 with a quarter at 32768 tokens, 537 and 534 to 537 at 131072.
inline constexpr int64_t kBackwardScratchBytes = int64_t{264} << 20;
// Queries of one call on a long causal block (ops/cudnn/block_plan.h).
inline constexpr int64_t kRowTokens = 65536;
// Documents of one call of cuDNN; more take several calls.
inline constexpr int64_t kMostDocuments = 128;
// Their lengths and offsets: 2 numbers of 4 bytes and 5 of 8 for each.
inline constexpr int64_t kDocumentTableBytes = int64_t{16} << 10;
// Above what grows with the tokens.
inline constexpr int64_t kGraphSlackBytes = int64_t{128} << 10;

// The sizes that cuDNN's scratch depends on.
struct AttentionSizes {
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_size = 0;

  AttentionSizes() = default;
  explicit AttentionSizes(const AttentionBlock& b)
      : queries(b.query.dim(0)),
        keys(b.key.dim(0)),
        heads(b.query.dim(1)),
        kv_heads(std::max<int64_t>(1, b.key.dim(1))),
        head_size(b.query.dim(2)) {}
  int64_t heads_of(int64_t kv) const { return kv * heads / kv_heads; }
  bool shares_kv_heads() const { return heads != kv_heads; }
};

inline int64_t attention_kernel_backward_scratch(const AttentionSizes& s) {
  return attention_kernel_backward_scratch(s.queries, s.heads, s.keys, s.kv_heads);
}

// A partial result in bf16 with its log-sum-exp, before it is merged into the state.
inline int64_t partial_out_bytes(const AttentionSizes& s) {
  return scratch_part(2 * s.queries * s.heads * s.head_size) + scratch_part(4 * s.heads * s.queries);
}

// Where results of a backward call go: straight into the caller's tensors, or into scratch from which they are added or
// widened.
enum class ResultPlace { caller, scratch };

// Log-sum-exps of `kv` key/value heads' query heads, packed.
inline int64_t packed_lse_bytes(const AttentionSizes& s, int64_t kv) {
  return scratch_part(4 * s.heads_of(kv) * s.queries);
}
inline int64_t d_query_bytes(const AttentionSizes& s, int64_t kv) {
  return scratch_part(2 * s.queries * s.heads_of(kv) * s.head_size);
}
inline int64_t d_key_bytes(const AttentionSizes& s, int64_t kv) { return scratch_part(2 * s.keys * kv * s.head_size); }

// The workspace of a backward graph for `kv` key/value heads at most.
inline int64_t backward_workspace_bytes(const AttentionSizes& s, int64_t kv) {
  const int64_t heads = s.heads_of(kv);
  const int64_t full_heads = s.shares_kv_heads() ? 4 * s.keys * heads * s.head_size : 0;
  return scratch_part(4 * s.queries * heads * (s.head_size + 1) + full_heads + kGraphSlackBytes);
}

inline int64_t backward_call_bytes(const AttentionSizes& s, int64_t kv, ResultPlace place) {
  const int64_t results = place == ResultPlace::scratch ? d_query_bytes(s, kv) + 2 * d_key_bytes(s, kv) : 0;
  return packed_lse_bytes(s, kv) + results + backward_workspace_bytes(s, kv);
}

// Key/value heads of one backward call: as many as divide all of them and stay within the limit, one at least.
inline int64_t kv_heads_a_call(const AttentionSizes& s, ResultPlace place) {
  for (int64_t calls = 1; calls < s.kv_heads; ++calls)
    if (s.kv_heads % calls == 0 && backward_call_bytes(s, s.kv_heads / calls, place) <= kBackwardScratchBytes)
      return s.kv_heads / calls;
  return 1;
}

// The most that any block of at most these sizes takes.
inline int64_t backward_scratch_bytes(const AttentionSizes& s, ResultPlace place) {
  return std::min(backward_call_bytes(s, s.kv_heads, place),
                  std::max(kBackwardScratchBytes, backward_call_bytes(s, 1, place)));
}

// Whether some forward result of at most these sizes passes through scratch on its way from cuDNN: one that goes to an
// fp32 state, or the second of a row of a long causal block.
inline bool cudnn_merges(const AttentionSizes& s, ResultPlace place) {
  if (place == ResultPlace::scratch) return !left_to_own_kernels({.head_size = s.head_size, .straight = false});
  return s.queries > kRowTokens &&
         !left_to_own_kernels(
             {.head_size = s.head_size, .queries = s.queries, .causal = true, .square = true, .straight = true});
}

inline bool cudnn_may_take(const AttentionBlock& b) { return b.query.dtype() == DType::bf16 && !b.keeps_blind; }

// Results in the query's type can be written by cuDNN itself.
inline ResultPlace place_of(const Tensor& result) {
  return result.dtype() == DType::bf16 ? ResultPlace::caller : ResultPlace::scratch;
}

inline int64_t attention_forward_scratch(const AttentionForward& call) {
  const int64_t own = attention_kernel_forward_scratch(call.block.query.dim(0), call.block.query.dim(1));
  if (!cudnn_may_take(call.block)) return own;
  AttentionSizes partial(call.block);
  const ResultPlace place = place_of(call.out);
  if (!cudnn_merges(partial, place)) partial.queries = 0;
  if (place == ResultPlace::caller) partial.queries = std::min(partial.queries, kRowTokens);
  return std::max(own, kDocumentTableBytes + kGraphSlackBytes + partial_out_bytes(partial));
}

inline int64_t attention_backward_scratch(const AttentionBackward& call) {
  const AttentionSizes sizes(call.block);
  const int64_t delta = call.delta.defined() ? 0 : scratch_part(4 * sizes.heads * sizes.queries);
  const int64_t own = attention_kernel_backward_scratch(sizes) + delta;
  if (!cudnn_may_take(call.block) || !call.out.defined() || leaves_gradients_to_own_kernels(sizes.head_size))
    return own;
  const bool straight = place_of(call.d_query) == ResultPlace::caller && place_of(call.d_key) == ResultPlace::caller &&
                        sizes.queries <= kRowTokens && sizes.queries >= sizes.keys;
  return std::max(own, backward_scratch_bytes(sizes, straight ? ResultPlace::caller : ResultPlace::scratch));
}

}  // namespace farspan::cuda
