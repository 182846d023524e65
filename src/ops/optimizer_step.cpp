// SPDX-License-Identifier: Apache-2.0
#include "ops/optimizer_step.h"

#include "ops/cpu/kernels.h"
#include "ops/cuda/ops.h"
#include "ops/operand_checks.h"

namespace farspan {
namespace {

void check_operand(std::string_view op, std::string_view operand, const Tensor& tensor, DType dtype,
                   const Tensor& weight) {
  check_dtype(op, operand, tensor, dtype);
  check_shape(op, operand, tensor, weight.shape());
  check_contiguous(op, operand, tensor);
}

void check_copy(std::string_view op, const Tensor& compute_weight, const Tensor& weight) {
  if (!compute_weight.defined()) return;
  check_compute_dtype(op, "compute_weight", compute_weight);
  check_operand(op, "compute_weight", compute_weight, compute_weight.dtype(), weight);
}

// Elements from `begin` on.
cpu::WeightCopy copy_of(const Tensor& compute_weight, int64_t begin) {
  if (!compute_weight.defined()) return {};
  return {static_cast<char*>(compute_weight.raw()) + begin * size_of(compute_weight.dtype()), compute_weight.dtype()};
}

double copy_bytes(const Tensor& compute_weight) {
  return compute_weight.defined() ? static_cast<double>(compute_weight.bytes()) : 0.0;
}

void adamw_on_cpu(const Device& device, AdamWStep adamw, const AdamWTensors& t) {
  adamw.weight_decay = t.weight_decay;
  parallel_for(device, t.weight.numel(), cpu::kElementsPerThread, [&](int64_t begin, int64_t end) {
    cpu::adamw_elements(adamw, t.gradient.data<float>() + begin, t.weight.data<float>() + begin,
                        t.m.data<float>() + begin, t.v.data<float>() + begin, copy_of(t.compute_weight, begin),
                        end - begin);
  });
}

}  // namespace

void adamw_step(Device& device, const AdamWStep& adamw, const Tensor& gradient, Tensor weight, Tensor m, Tensor v,
                Tensor compute_weight) {
  const AdamWTensors parameter = {gradient, weight, m, v, compute_weight, adamw.weight_decay};
  adamw_step_many(device, adamw, std::span(&parameter, 1));
}

void adamw_step_many(Device& device, const AdamWStep& adamw, std::span<const AdamWTensors> tensors) {
  constexpr std::string_view op = "adamw_step";
  FARSPAN_CHECK(adamw.step >= 1, "adamw_step: step {}; steps count from 1", adamw.step);
  double elements = 0, copied = 0;
  for (const AdamWTensors& t : tensors) {
    check_operand(op, "weight", t.weight, DType::f32, t.weight);
    check_operand(op, "gradient", t.gradient, DType::f32, t.weight);
    check_operand(op, "m", t.m, DType::f32, t.weight);
    check_operand(op, "v", t.v, DType::f32, t.weight);
    check_copy(op, t.compute_weight, t.weight);
    elements += static_cast<double>(t.weight.numel());
    copied += copy_bytes(t.compute_weight);
  }
  device.run({op, OpClass::memory, 15 * elements, 28 * elements + copied}, [&] {
    if (device.on_cuda()) return cuda::adamw_step(device, adamw, tensors);
    for (const AdamWTensors& t : tensors) adamw_on_cpu(device, adamw, t);
  });
}

void sgd_step(Device& device, const SgdStep& sgd, const Tensor& gradient, Tensor weight, Tensor compute_weight) {
  check_operand("sgd_step", "weight", weight, DType::f32, weight);
  check_operand("sgd_step", "gradient", gradient, DType::f32, weight);
  check_copy("sgd_step", compute_weight, weight);

  const double elements = static_cast<double>(weight.numel());
  const double bytes = 12 * elements + copy_bytes(compute_weight);
  device.run({"sgd_step", OpClass::memory, 4 * elements, bytes}, [&] {
    if (device.on_cuda()) return cuda::sgd_step(device, sgd, gradient, weight, compute_weight);
    parallel_for(device, weight.numel(), cpu::kElementsPerThread, [&](int64_t begin, int64_t end) {
      cpu::sgd_elements(sgd, gradient.data<float>() + begin, weight.data<float>() + begin,
                        copy_of(compute_weight, begin), end - begin);
    });
  });
}

}  // namespace farspan
