// SPDX-License-Identifier: Apache-2.0
#include "ops/fp8.h"

#include "base/math.h"
#include "ops/amax.h"
#include "ops/cpu/fp8.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/scratch.h"
#include "ops/operand_checks.h"

namespace farspan {
namespace {

constexpr std::string_view kOp = "fp8_quantise";

void check_copy(std::string_view name, const Tensor& copy, const Shape& expected, DType dtype) {
  check_dtype(kOp, name, copy, dtype);
  check_shape(kOp, name, copy, expected);
  check_contiguous(kOp, name, copy);
}

}  // namespace

void fp8_quantise(Device& device, const Tensor& x, const Tensor& amax, const Fp8Matrix& to) {
  check_dtype(kOp, "x", x, DType::bf16);
  check_rank(kOp, "x", x, 2, 2);
  check_dense_rows(kOp, "x", x);
  FARSPAN_CHECK(to.values.defined() || to.transposed.defined(), "{}: neither values nor transposed is defined", kOp);
  const DType dtype = to.values.defined() ? to.values.dtype() : to.transposed.dtype();
  FARSPAN_CHECK(is_fp8(dtype), "{}: values hold {}, expected f8e4m3 or f8e5m2", kOp, name_of(dtype));
  FARSPAN_CHECK(x.dim(1) % kFp8Multiple == 0, "{}: x is {}, expected columns in multiples of {}", kOp, x.shape().str(),
                kFp8Multiple);
  check_amax(kOp, "amax", amax);
  check_dtype(kOp, "scale", to.scale, DType::f32);
  check_shape(kOp, "scale", to.scale, Shape{1});
  double written = 0;
  if (to.values.defined()) {
    check_copy("values", to.values, x.shape(), dtype);
    written += static_cast<double>(to.values.bytes());
  }
  if (to.transposed.defined()) {
    check_copy("transposed", to.transposed, Shape{x.dim(1), round_up(x.dim(0), kFp8Multiple)}, dtype);
    written += static_cast<double>(to.transposed.bytes());
  }
  // Read to be rounded, and before that for the largest value where it is not known.
  const double bytes = static_cast<double>((amax.defined() ? 1 : 2) * x.bytes() + amax_bytes(amax)) + written;
  const int64_t scratch = device.targets_cuda() && !amax.defined() ? cuda::kFp8QuantiseScratch : 0;
  device.run({kOp, OpClass::memory, static_cast<double>(x.numel()), bytes, scratch}, [&] {
    if (device.on_cuda())
      cuda::fp8_quantise(device, x, amax, to);
    else
      cpu::fp8_quantise(device, x, amax, to);
  });
}

void largest_magnitudes(Device& device, std::span<const Tensor> matrices, Tensor amax) {
  constexpr std::string_view op = "largest_magnitudes";
  FARSPAN_CHECK(matrices.size() <= kMostMeasured, "{}: {} matrices, expected {} at most", op, matrices.size(),
                kMostMeasured);
  check_dtype(op, "amax", amax, DType::f32);
  check_shape(op, "amax", amax, Shape{std::ssize(matrices)});
  check_contiguous(op, "amax", amax);
  int64_t bytes = amax.bytes(), elements = 0;
  for (const Tensor& x : matrices) {
    check_dtype(op, "x", x, DType::bf16);
    check_rank(op, "x", x, 2, 2);
    check_dense_rows(op, "x", x);
    FARSPAN_CHECK(x.dim(1) % kFp8Multiple == 0, "{}: x is {}, expected columns in multiples of {}", op, x.shape().str(),
                  kFp8Multiple);
    bytes += x.bytes();
    elements += x.numel();
  }
  device.run({op, OpClass::memory, static_cast<double>(elements), static_cast<double>(bytes)}, [&] {
    if (device.on_cuda())
      cuda::largest_magnitudes(device, matrices, amax);
    else
      cpu::largest_magnitudes(device, matrices, amax);
  });
}

}  // namespace farspan
