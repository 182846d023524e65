// SPDX-License-Identifier: Apache-2.0
// Tensor parallelism as layers see it. A column-parallel linear gives each rank some of the output features and needs
// nothing from the others; a row-parallel one leaves each rank with a partial sum of every feature, and the group adds
// them. Between the two the hidden stream is the same on every rank, or, under sequence parallelism, cut by tokens:
// rank r holds tokens [r T / tp, (r + 1) T / tp), which are gathered before a column-parallel linear and come back
// summed and cut after a row-parallel one.
//
// Partial sums are fp32 and stay fp32 until the group has added them in rank order, so bf16 is rounded once, as on one
// rank. Received per rank for T tokens of width H, with n = tp:
//   all_reduce (no sequence parallelism)   2 T H 4 (n - 1) / n    for each sum
//   gather                                 T H b (n - 1) / n      b: bytes of the stream's type
//   reduce_scatter                         T H 4 (n - 1) / n
// Sources: Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al., Reducing Activation Recomputation (2022),
// section 4.2.2.
#pragma once

#include <string_view>

#include "comm/communicator.h"
#include "device/device.h"
#include "memory/arena.h"
#include "tensor/tensor.h"

namespace farspan {

class TensorParallel {
 public:
  TensorParallel(Communicator& group, bool sequence_parallel)
      : group_(group), sequence_parallel_(sequence_parallel && group.size() > 1) {}

  Communicator& group() const { return group_; }
  int size() const { return group_.size(); }
  int rank() const { return group_.rank(); }
  bool sequence_parallel() const { return sequence_parallel_; }
  // How many ranks the hidden stream's tokens are cut over: tp under sequence parallelism, else 1.
  int token_ranks() const { return sequence_parallel_ ? group_.size() : 1; }

 private:
  Communicator& group_;
  bool sequence_parallel_;
};

// The tokens that a column-parallel linear reads: those of all ranks under sequence parallelism, else `part` itself.
class GatheredTokens {
 public:
  // Starts the gather of part (t, H), contiguous; `name` is the buffer's.
  GatheredTokens(const TensorParallel& tensor, Arena& arena, std::string_view name, const Tensor& part);
  // (token_ranks t, H), once it is there.
  const Tensor& wait() {
    arrival_.wait();
    return tokens_;
  }

 private:
  Buffer buffer_;
  Work arrival_;
  Tensor tokens_;
};

// Where a row-parallel linear, or the input gradient of a column-parallel one, writes. Alone, that is the result
// itself; else a partial sum whose total `finish` brings to the result.
class PartialSum {
 public:
  // result (t, H), contiguous: written by finish (by the caller already, when alone).
  PartialSum(const TensorParallel& tensor, Device& device, Arena& arena, std::string_view name, Tensor result);
  const Tensor& target() const { return target_; }  // (token_ranks t, H); f32 where ranks are summed
  void start();
  void finish();  // starts first where that has not been done

 private:
  const TensorParallel& tensor_;
  Device& device_;
  std::string_view name_;
  bool started_ = false;
  Tensor result_;
  Buffer partial_;  // (token_ranks t, H) f32
  Buffer summed_;   // (t, H) f32: under sequence parallelism, where the result has another type
  Tensor target_;
  Work work_;
};

}  // namespace farspan
