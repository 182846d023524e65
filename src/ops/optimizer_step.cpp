// SPDX-License-Identifier: Apache-2.0
#include "ops/optimizer_step.h"

#include "ops/cpu/kernels.h"
#include "ops/operand_checks.h"

namespace farspan {
namespace {

void check_operand(std::string_view op, std::string_view operand, const Tensor& tensor, DType dtype,
                   const Tensor& weight) {
  check_dtype(op, operand, tensor, dtype);
  check_shape(op, operand, tensor, weight.shape());
  check_contiguous(op, operand, tensor);
}

BFloat16* copy_or_null(const Tensor& compute_weight) {
  return compute_weight.defined() ? compute_weight.data<BFloat16>() : nullptr;
}

// The same as p + n, where p may be null.
BFloat16* advance(BFloat16* p, int64_t n) { return p == nullptr ? nullptr : p + n; }

}  // namespace

void adamw_step(Device& device, const AdamWStep& adamw, const Tensor& gradient, Tensor weight, Tensor m, Tensor v,
                Tensor compute_weight) {
  check_operand("adamw_step", "weight", weight, DType::f32, weight);
  check_operand("adamw_step", "gradient", gradient, DType::f32, weight);
  check_operand("adamw_step", "m", m, DType::f32, weight);
  check_operand("adamw_step", "v", v, DType::f32, weight);
  if (compute_weight.defined()) check_operand("adamw_step", "compute_weight", compute_weight, DType::bf16, weight);
  FARSPAN_CHECK(adamw.step >= 1, "adamw_step: step {}; steps count from 1", adamw.step);

  const double elements = static_cast<double>(weight.numel());
  const double bytes = elements * (compute_weight.defined() ? 30 : 28);
  device.run({"adamw_step", OpClass::memory, 15 * elements, bytes}, [&] {
    parallel_for(device, weight.numel(), cpu::kElementsPerThread, [&](int64_t begin, int64_t end) {
      cpu::adamw_elements(adamw, gradient.data<float>() + begin, weight.data<float>() + begin, m.data<float>() + begin,
                          v.data<float>() + begin, advance(copy_or_null(compute_weight), begin), end - begin);
    });
  });
}

void sgd_step(Device& device, const SgdStep& sgd, const Tensor& gradient, Tensor weight, Tensor compute_weight) {
  check_operand("sgd_step", "weight", weight, DType::f32, weight);
  check_operand("sgd_step", "gradient", gradient, DType::f32, weight);
  if (compute_weight.defined()) check_operand("sgd_step", "compute_weight", compute_weight, DType::bf16, weight);

  const double elements = static_cast<double>(weight.numel());
  const double bytes = elements * (compute_weight.defined() ? 14 : 12);
  device.run({"sgd_step", OpClass::memory, 4 * elements, bytes}, [&] {
    parallel_for(device, weight.numel(), cpu::kElementsPerThread, [&](int64_t begin, int64_t end) {
      cpu::sgd_elements(sgd, gradient.data<float>() + begin, weight.data<float>() + begin,
                        advance(copy_or_null(compute_weight), begin), end - begin);
    });
  });
}

}  // namespace farspan
