// SPDX-License-Identifier: Apache-2.0
#include "plan/machine.h"

#include <gtest/gtest.h>

namespace farspan {
namespace {

TEST(Machine, RanksOnOneGpuShareItsRates) {
  const Machine alone = gpu_machine("NVIDIA H200", Precision::bf16, 128, 1);
  const Machine shared = gpu_machine("NVIDIA H200", Precision::bf16, 128, 4);
  EXPECT_DOUBLE_EQ(shared.gemm_flops, alone.gemm_flops / 4);
  EXPECT_DOUBLE_EQ(shared.memory_bandwidth, alone.memory_bandwidth / 4);
  EXPECT_DOUBLE_EQ(shared.peak_flops, alone.peak_flops / 4);
  EXPECT_DOUBLE_EQ(shared.link_bandwidth, shared.memory_bandwidth / 2);  // copies within the GPU
}

TEST(Machine, AttentionTogetherTakesTheTimeOfItsParts) {
  for (int64_t head : {64, 128}) {
    const Machine machine = gpu_machine("NVIDIA H200", Precision::bf16, head, 1);
    const double apart = 4 / machine.attention_forward_flops + 10 / machine.attention_backward_flops;
    EXPECT_DOUBLE_EQ(14 / machine.attention_flops, apart);
  }
  EXPECT_GT(gpu_machine("NVIDIA H200", Precision::bf16, 128, 1).attention_flops,
            gpu_machine("NVIDIA H200", Precision::bf16, 64, 1).attention_flops);
}

TEST(Machine, AGpuThatIsNotKnownHasNoPeak) {
  const Machine unknown = gpu_machine("Some GPU", Precision::bf16, 128, 1);
  EXPECT_EQ(unknown.name, "Some GPU");
  EXPECT_EQ(unknown.peak_flops, 0);
  EXPECT_GT(unknown.gemm_flops, 0);
  EXPECT_LT(gpu_machine("NVIDIA H200", Precision::fp32, 128, 1).peak_flops,
            gpu_machine("NVIDIA H200", Precision::bf16, 128, 1).peak_flops);
}

TEST(Machine, CeilingsAreTheMachines) {
  const Machine machine = gpu_machine("NVIDIA H200", Precision::bf16, 128, 1);
  const Ceilings ceilings = ceilings_of(machine);
  EXPECT_EQ(ceilings.machine, machine.name);
  const OpCost backward = {.op = "attention_block_backward", .op_class = OpClass::attention};
  EXPECT_EQ(ceilings.flops_of(backward), machine.attention_backward_flops);
  EXPECT_EQ(ceilings.flops_of({.op = "attention_block_forward", .op_class = OpClass::attention}),
            machine.attention_forward_flops);
  EXPECT_EQ(ceilings.flops_of({.op = "linear_backward_input", .op_class = OpClass::gemm}), machine.gemm_flops);
  EXPECT_EQ(ceilings.flops_of({.op = "fp8_linear_forward", .op_class = OpClass::gemm_fp8}), machine.fp8_gemm_flops);
  EXPECT_GT(machine.fp8_gemm_flops, machine.gemm_flops);
}

}  // namespace
}  // namespace farspan
