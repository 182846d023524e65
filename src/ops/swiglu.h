// SPDX-License-Identifier: Apache-2.0
// SwiGLU: y = silu(gate) * up, silu(g) = g / (1 + exp(-g)).
// Source: Shazeer, "GLU Variants Improve Transformer" (2020), equation 6.
// One dtype for all operands, f32 or bf16; fp32 inside. Rows may be strided. Throws InternalError on misfits.
#pragma once

#include "device/device.h"
#include "tensor/tensor.h"

namespace farspan {

// gate_up (T, 2F): gate in the first F columns, up in the rest; y (T, F). amax: of y (ops/amax.h).
void swiglu_forward(Device& device, const Tensor& gate_up, Tensor y, Tensor amax = {});

// With s = sigmoid(gate):
//   d_gate = d_y * up * s * (1 + gate * (1 - s)),   d_up = d_y * gate * s
// gate_up (T, 2F), d_y (T, F), d_gate_up (T, 2F), which may be gate_up itself.
void swiglu_backward(Device& device, const Tensor& gate_up, const Tensor& d_y, Tensor d_gate_up);

// The same, and y (T, F) as forward gives it, for a weight gradient that is still to come: where y was not kept this
// reads gate_up once less. y may be d_y. d_amax: of d_gate_up; amax: of y (ops/amax.h).
void swiglu_backward_and_output(Device& device, const Tensor& gate_up, const Tensor& d_y, Tensor d_gate_up, Tensor y,
                                Tensor d_amax = {}, Tensor amax = {});

}  // namespace farspan
