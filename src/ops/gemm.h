// SPDX-License-Identifier: Apache-2.0
// Matrix products. Operands are 2-D views whose last stride is 1; rows may lie further apart than their length, so a
// slice of columns (one head's part of the fused QKV) is used in place.
//
// Types: f32 x f32 -> f32;  bf16 x bf16 -> f32 or bf16;  fp8 x fp8 -> f32 or bf16. Sums are fp32 throughout; a bf16
// result is rounded once, after the sum with c or the residual. (Not so on Hopper GPUs: there cuBLASLt's kernels round
// a bf16 product before they add to it, and the sum again, as two ops would.) Throws InternalError on shapes or types
// that do not fit.
#pragma once

#include <string>
#include <vector>

#include "device/device.h"
#include "ops/accumulate.h"
#include "ops/fp8.h"
#include "tensor/tensor.h"

namespace farspan {

enum class Transpose { no, yes };

// c (M, N) = op(a) op(b), plus c itself when accumulating. op(a) is (M, K), op(b) is (K, N).
// K = 0: c becomes zero, or stays when accumulating. c must not overlap a or b.
void gemm(Device& device, const Tensor& a, Transpose transpose_a, const Tensor& b, Transpose transpose_b, Tensor c,
          Accumulate accumulate);

// y (T, O) = x (T, I) weight (O, I)^T
void linear_forward(Device& device, const Tensor& x, const Tensor& weight, Tensor y);

// y (T, O) = x (T, I) weight (O, I)^T + residual (T, O), which is of y's type; y itself, or apart from it
void linear_forward(Device& device, const Tensor& x, const Tensor& weight, const Tensor& residual, Tensor y);

// d_x (T, I) = d_y (T, O) weight (O, I), plus d_x itself when accumulating
void linear_backward_input(Device& device, const Tensor& d_y, const Tensor& weight, Tensor d_x, Accumulate accumulate);

// d_weight (O, I) f32 = d_y (T, O)^T x (T, I), plus d_weight itself when accumulating
void linear_backward_weight(Device& device, const Tensor& d_y, const Tensor& x, Tensor d_weight, Accumulate accumulate);

// The same products of matrices in fp8, summed in fp32 and scaled once, after the sum; y and d_x are f32 or bf16. Each
// reads of its operands the copy that lies along the summed dimension: forward x.values and weight.values, backward to
// the input d_y.values and weight.transposed, to the weight d_y.transposed and x.transposed.
// The forward ones use fast accumulation, where a GPU's matrix units keep some 14 bits of a running sum; the backward
// ones have partial sums promoted to fp32 (docs/decisions/0015-fp8.md).
// Two f8e5m2 operands have no kernel in a GPU's library and run on the slow reference.
void linear_forward(Device& device, const Fp8Matrix& x, const Fp8Matrix& weight, Tensor y);
void linear_forward(Device& device, const Fp8Matrix& x, const Fp8Matrix& weight, const Tensor& residual, Tensor y);
void linear_backward_input(Device& device, const Fp8Matrix& d_y, const Fp8Matrix& weight, Tensor d_x,
                           Accumulate accumulate);
void linear_backward_weight(Device& device, const Fp8Matrix& d_y, const Fp8Matrix& x, Tensor d_weight,
                            Accumulate accumulate);

// How a CUDA device chooses among the algorithms that its library offers for a product. They sum in different orders,
// each always in the same one.
//   timed      the fastest, measured once when a device first meets a product of that shape, which waits for the device
//   heuristic  the library's first; so the same bits in every run on the same kind of GPU
enum class GemmChoice { timed, heuristic };
// For the products the device has not met yet; timed where nothing is said. A CPU has one way only.
void set_gemm_choice(Device& device, GemmChoice choice);

// The implementations of a kind of device in the order they are tried; the first that does not decline runs.
// FARSPAN_VERBOSE=1 in the environment prints, once per distinct choice, which ran and why those before it declined.
std::vector<std::string> gemm_implementations(DeviceKind kind);

}  // namespace farspan
