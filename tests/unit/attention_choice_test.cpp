// SPDX-License-Identifier: Apache-2.0
// Which plain and causal blocks a GPU's own kernels take though cuDNN could, and what scratch that spares.
#include <gtest/gtest.h>

#include "ops/cuda/attention_scratch.h"

namespace farspan {
namespace {

using cuda::left_to_own_kernels;

TEST(AttentionChoice, LongCausalRowsAreTheOwnKernels) {
  const auto left = [](int64_t head_size, int64_t queries) {
    return left_to_own_kernels(
               {.head_size = head_size, .queries = queries, .causal = true, .square = true, .straight = true})
        .has_value();
  };
  EXPECT_FALSE(left(128, 16384));
  EXPECT_TRUE(left(128, 32768));
  EXPECT_FALSE(left(64, 65536));
  EXPECT_TRUE(left(64, 131072));
  EXPECT_TRUE(left(256, 1024));
  for (int64_t head_size : {72, 96, 112, 136, 192, 224})
    EXPECT_FALSE(left(head_size, 131072)) << "a head of " << head_size << " is computed as a wider one";
}

TEST(AttentionChoice, PlainBlocksAreLeftOnlyWhereCudnnWouldHaveToMerge) {
  for (int64_t head_size : {64, 96, 128, 192, 256}) {
    EXPECT_FALSE(left_to_own_kernels({.head_size = head_size, .queries = 131072, .straight = true}));
    EXPECT_EQ(left_to_own_kernels({.head_size = head_size, .queries = 131072, .straight = false}).has_value(),
              head_size == 128);
  }
}

AttentionForward call(int64_t tokens, int64_t head_size, DType out) {
  static char nothing;  // tensors are defined; nobody looks at what they hold
  AttentionForward call;
  call.block.query = Tensor(&nothing, DType::bf16, {tokens, 4, head_size});
  call.block.key = call.block.value = Tensor(&nothing, DType::bf16, {tokens, 2, head_size});
  call.out = Tensor(&nothing, out, call.block.query.shape());
  return call;
}

// A result that passes through scratch takes 2 bytes an element; nothing else that is planned comes near that.
TEST(AttentionChoice, ScratchForMergesIsPlannedWhereCudnnMerges) {
  const auto has_room = [](int64_t tokens, int64_t rows, int64_t head_size, DType out) {
    return cuda::attention_forward_scratch(call(tokens, head_size, out)) >= 2 * rows * 4 * head_size;
  };
  EXPECT_TRUE(has_room(16384, 16384, 64, DType::f32));
  EXPECT_TRUE(has_room(16384, 16384, 256, DType::f32)) << "plain blocks";
  EXPECT_FALSE(has_room(16384, 16384, 128, DType::f32));
  EXPECT_FALSE(has_room(65536, 65536, 96, DType::bf16));
  EXPECT_TRUE(has_room(131072, 65536, 96, DType::bf16)) << "rows of a long causal block";
  for (int64_t head_size : {64, 128, 256}) EXPECT_FALSE(has_room(131072, 65536, head_size, DType::bf16));
}

TEST(AttentionChoice, GradientsOfWideHeadsPlanNoneOfCudnnsScratch) {
  const auto scratch = [](int64_t head_size) {
    const AttentionForward forward = call(16384, head_size, DType::bf16);
    return cuda::attention_backward_scratch({.block = forward.block,
                                             .out = forward.out,
                                             .d_out = forward.out,
                                             .lse = {},
                                             .delta = forward.out,
                                             .d_query_use = Accumulate::no,
                                             .d_key_value_use = Accumulate::no,
                                             .d_query = forward.out,
                                             .d_key = forward.block.key,
                                             .d_value = forward.block.value});
  };
  EXPECT_LT(scratch(256), 2 << 20);
  EXPECT_GT(scratch(192), 64 << 20);
}

}  // namespace
}  // namespace farspan
