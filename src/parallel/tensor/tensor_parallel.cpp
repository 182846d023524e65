// SPDX-License-Identifier: Apache-2.0
#include "parallel/tensor/tensor_parallel.h"

#include "ops/elementwise.h"

namespace farspan {

GatheredTokens::GatheredTokens(const TensorParallel& tensor, Arena& arena, std::string_view name, const Tensor& part)
    : tokens_(part) {
  if (!tensor.sequence_parallel()) return;
  buffer_ = arena.take(name, part.dtype(), {tensor.size() * part.dim(0), part.dim(1)}, Purpose::communication);
  tokens_ = buffer_.tensor();
  arrival_ = tensor.group().all_gather(part, tokens_, name);
}

PartialSum::PartialSum(const TensorParallel& tensor, Device& device, Arena& arena, std::string_view name, Tensor result)
    : tensor_(tensor), device_(device), name_(name), result_(result), target_(result) {
  if (tensor.size() == 1) return;
  const bool in_place = result.dtype() == DType::f32;
  if (tensor.sequence_parallel() || !in_place) {
    partial_ =
        arena.take(name, DType::f32, {tensor.token_ranks() * result.dim(0), result.dim(1)}, Purpose::communication);
    target_ = partial_.tensor();
  }
  if (tensor.sequence_parallel() && !in_place)
    summed_ = arena.take(name, DType::f32, result.shape(), Purpose::communication);
}

void PartialSum::start() {
  started_ = true;
  if (tensor_.size() == 1) return;
  work_ = tensor_.sequence_parallel()
              ? tensor_.group().reduce_scatter(target_, summed_.taken() ? summed_.tensor() : result_, name_)
              : tensor_.group().all_reduce(target_, name_);
}

void PartialSum::finish() {
  if (!started_) start();
  work_.wait();
  if (summed_.taken())
    cast(device_, summed_, result_);
  else if (partial_.taken() && !tensor_.sequence_parallel())
    cast(device_, partial_, result_);
  summed_.release();
  partial_.release();
}

}  // namespace farspan
