// SPDX-License-Identifier: Apache-2.0
#include "ops/rms_norm_rope.h"

#include <bit>

#include "ops/cuda/ops.h"
#include "ops/cuda/scratch.h"
#include "ops/elementwise.h"
#include "ops/operand_checks.h"
#include "ops/rms_norm.h"

namespace farspan {
namespace {

// Whether the device has one pass for such heads: a power of two of lanes, at most a warp, hold two vectors of 16 bytes
// each, and the weight is of the heads' type. Where they lie does not matter, so that plans know it too.
bool is_one_pass(const Device& device, const Tensor& x, const Tensor& weight) {
  const int64_t head_bytes = x.dim(-1) * size_of(x.dtype());
  if (!device.targets_cuda() || head_bytes % 32 != 0 || weight.dtype() != x.dtype()) return false;
  const int64_t lanes = head_bytes / 32;
  return lanes <= 32 && std::has_single_bit(static_cast<uint64_t>(lanes));
}

void check_heads(std::string_view op, std::string_view name, const Tensor& heads, const Tensor& x) {
  check_dtype(op, name, heads, x.dtype());
  check_rank(op, name, heads, 3, 3);
  check_shape(op, name, heads, x.shape());
  check_dense_rows(op, name, heads);
}

void check_operands(std::string_view op, const Tensor& x, const Tensor& weight, const Tensor& rstd,
                    const Tensor& table) {
  check_compute_dtype(op, "x", x);
  check_heads(op, "x", x, x);
  FARSPAN_CHECK(x.dim(2) % 2 == 0, "{}: head size {}; channels turn in pairs, so it must be even", op, x.dim(2));
  check_compute_dtype(op, "weight", weight);
  check_shape(op, "weight", weight, Shape({x.dim(2)}));
  check_contiguous(op, "weight", weight);
  check_dtype(op, "rstd", rstd, DType::f32);
  check_shape(op, "rstd", rstd, Shape({x.dim(0), x.dim(1)}));
  check_contiguous(op, "rstd", rstd);
  check_dtype(op, "table", table, DType::f32);
  check_shape(op, "table", table, Shape({x.dim(0), 2, x.dim(2) / 2}));
  check_contiguous(op, "table", table);
}

}  // namespace

void rms_norm_rope_forward(Device& device, const Tensor& x, const Tensor& weight, double epsilon, const Tensor& table,
                           RopeStyle style, Tensor y, Tensor rstd) {
  constexpr std::string_view kOp = "rms_norm_rope_forward";
  check_operands(kOp, x, weight, rstd, table);
  check_heads(kOp, "y", y, x);
  if (!is_one_pass(device, x, weight)) {
    rms_norm_forward(device, x, weight, epsilon, y, rstd);
    rope_apply(device, table, style, RopeDirection::forward, y);
    return;
  }
  const double flops = 7.0 * static_cast<double>(x.numel());
  const double bytes = static_cast<double>(x.bytes() + y.bytes() + weight.bytes() + rstd.bytes() + table.bytes());
  device.run({kOp, OpClass::memory, flops, bytes},
             [&] { cuda::rms_norm_rope_forward(device, x, weight, epsilon, table, style, y, rstd); });
}

void rms_norm_rope_backward(Device& device, const Tensor& d_y, const Tensor& x, const Tensor& weight,
                            const Tensor& rstd, const Tensor& table, RopeStyle style, Tensor d_x, Tensor d_weight) {
  constexpr std::string_view kOp = "rms_norm_rope_backward";
  check_operands(kOp, x, weight, rstd, table);
  check_heads(kOp, "d_y", d_y, x);
  check_heads(kOp, "d_x", d_x, x);
  check_dtype(kOp, "d_weight", d_weight, DType::f32);
  check_shape(kOp, "d_weight", d_weight, weight.shape());
  check_contiguous(kOp, "d_weight", d_weight);
  if (!is_one_pass(device, x, weight)) {
    if (d_x.raw() != d_y.raw()) cast(device, d_y, d_x);
    rope_apply(device, table, style, RopeDirection::backward, d_x);
    rms_norm_backward(device, d_x, x, weight, rstd, d_x, Accumulate::no, d_weight);
    return;
  }
  const double flops = 14.0 * static_cast<double>(x.numel());
  const double bytes = static_cast<double>(d_y.bytes() + x.bytes() + d_x.bytes() + weight.bytes() + rstd.bytes() +
                                           table.bytes() + 2 * d_weight.bytes());
  device.run({kOp, OpClass::memory, flops, bytes, cuda::rms_norm_backward_scratch(rstd.numel(), x.dim(2))},
             [&] { cuda::rms_norm_rope_backward(device, d_y, x, weight, rstd, table, style, d_x, d_weight); });
}

}  // namespace farspan
