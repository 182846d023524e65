// SPDX-License-Identifier: Apache-2.0
#include "ops/swiglu.h"

#include "ops/amax.h"
#include "ops/cpu/amax.h"
#include "ops/cpu/kernels.h"
#include "ops/cuda/ops.h"
#include "ops/operand_checks.h"

namespace farspan {
namespace {

void check_operand(std::string_view op, std::string_view operand, const Tensor& tensor, const Shape& shape,
                   DType dtype) {
  check_shape(op, operand, tensor, shape);
  check_dtype(op, operand, tensor, dtype);
  check_dense_rows(op, operand, tensor);
}

void check_gate_up(std::string_view op, const Tensor& gate_up) {
  check_compute_dtype(op, "gate_up", gate_up);
  check_rank(op, "gate_up", gate_up, 2, 2);
  check_dense_rows(op, "gate_up", gate_up);
  FARSPAN_CHECK(gate_up.dim(1) % 2 == 0, "{}: gate_up has {} columns, expected an even number", op, gate_up.dim(1));
}

// y undefined: not written.
void run_backward(Device& device, std::string_view op, const Tensor& gate_up, const Tensor& d_y,
                  const Tensor& d_gate_up, const Tensor& y, const Tensor& d_amax, const Tensor& amax) {
  check_gate_up(op, gate_up);
  const Shape shape({gate_up.dim(0), gate_up.dim(1) / 2});
  check_operand(op, "d_y", d_y, shape, gate_up.dtype());
  check_operand(op, "d_gate_up", d_gate_up, gate_up.shape(), gate_up.dtype());
  if (y.defined()) check_operand(op, "y", y, shape, gate_up.dtype());
  check_amax(op, "d_amax", d_amax);
  check_amax(op, "amax", amax);
  const double flops = (y.defined() ? 12.0 : 11.0) * static_cast<double>(d_y.numel());
  const double bytes = static_cast<double>(gate_up.bytes() + d_y.bytes() + d_gate_up.bytes() +
                                           (y.defined() ? y.bytes() : 0) + amax_bytes(d_amax) + amax_bytes(amax));
  device.run({op, OpClass::memory, flops, bytes}, [&] {
    if (device.on_cuda()) return cuda::swiglu_backward(device, gate_up, d_y, d_gate_up, y, d_amax, amax);
    cpu::SwiGlu swiglu{cpu::RowView(gate_up), cpu::RowView(d_y), cpu::RowView(d_gate_up), d_y.dtype()};
    swiglu.has_y = y.defined();
    if (y.defined()) swiglu.y = cpu::RowView(y);
    for (const Tensor& cleared : {d_amax, amax})
      if (cleared.defined()) *cleared.data<float>() = 0;
    parallel_for(device, d_y.dim(0), cpu::row_grain(d_y.dim(1)), [&](int64_t begin, int64_t end) {
      cpu::swiglu_backward(swiglu, begin, end);
      if (d_amax.defined()) cpu::raise_amax(swiglu.out, swiglu.dtype, begin, end, *d_amax.data<float>());
      if (amax.defined()) cpu::raise_amax(swiglu.y, swiglu.dtype, begin, end, *amax.data<float>());
    });
  });
}

}  // namespace

void swiglu_forward(Device& device, const Tensor& gate_up, Tensor y, Tensor amax) {
  check_gate_up("swiglu_forward", gate_up);
  check_operand("swiglu_forward", "y", y, Shape({gate_up.dim(0), gate_up.dim(1) / 2}), gate_up.dtype());
  check_amax("swiglu_forward", "amax", amax);
  const double flops = 5.0 * static_cast<double>(y.numel());
  const double bytes = static_cast<double>(gate_up.bytes() + y.bytes() + amax_bytes(amax));
  device.run({"swiglu_forward", OpClass::memory, flops, bytes}, [&] {
    if (device.on_cuda()) return cuda::swiglu_forward(device, gate_up, y, amax);
    const cpu::SwiGlu swiglu{cpu::RowView(gate_up), {}, cpu::RowView(y), y.dtype()};
    if (amax.defined()) *amax.data<float>() = 0;
    parallel_for(device, y.dim(0), cpu::row_grain(y.dim(1)), [&](int64_t begin, int64_t end) {
      cpu::swiglu_forward(swiglu, begin, end);
      if (amax.defined()) cpu::raise_amax(swiglu.out, swiglu.dtype, begin, end, *amax.data<float>());
    });
  });
}

void swiglu_backward(Device& device, const Tensor& gate_up, const Tensor& d_y, Tensor d_gate_up) {
  run_backward(device, "swiglu_backward", gate_up, d_y, d_gate_up, {}, {}, {});
}

void swiglu_backward_and_output(Device& device, const Tensor& gate_up, const Tensor& d_y, Tensor d_gate_up, Tensor y,
                                Tensor d_amax, Tensor amax) {
  run_backward(device, "swiglu_backward_and_output", gate_up, d_y, d_gate_up, y, d_amax, amax);
}

}  // namespace farspan
