// SPDX-License-Identifier: Apache-2.0
#include "model/projection.h"

#include "base/math.h"
#include "ops/gemm.h"

namespace farspan {
namespace {

constexpr DType kForward = DType::f8e4m3;
constexpr DType kGradient = DType::f8e5m2;

}  // namespace

Buffer take_amax(const LayerContext& context, std::string_view name, int64_t count, Purpose purpose) {
  return context.fp8 ? context.take_f32(name, {count}, purpose) : Buffer();
}

Buffer take_stream_amax(const LayerContext& context, std::string_view name, int64_t count, Purpose purpose) {
  return context.tensor.token_ranks() == 1 ? take_amax(context, name, count, purpose) : Buffer();
}

Tensor amax_of(const Buffer& room, int64_t index) {
  return room.taken() ? room.tensor().slice(0, index, index + 1) : Tensor();
}

Fp8Copy::Fp8Copy(const LayerContext& context, const Measured& x, DType dtype, Along along) {
  if (!context.fp8) return;
  const int64_t rows = x.matrix.dim(0), columns = x.matrix.dim(1);
  const auto take = [&](std::string_view name, DType type, const Shape& shape) {
    return context.arena.take(name, type, shape, Purpose::workspace);
  };
  if (along != Along::columns) {
    values_ = take("fp8.values", dtype, {rows, columns});
    matrix_.values = values_;
  }
  if (along != Along::rows) {
    transposed_ = take("fp8.transposed", dtype, {columns, round_up(rows, kFp8Multiple)});
    matrix_.transposed = transposed_;
  }
  scale_ = take("fp8.scale", DType::f32, {1});
  matrix_.scale = scale_;
  fp8_quantise(context.device, x.matrix, x.amax, matrix_);
}

void project(const LayerContext& context, const Measured& x, const Measured& weight, Tensor y) {
  if (!context.fp8) return linear_forward(context.device, x.matrix, weight.matrix, y);
  const Fp8Copy weight_copy(context, weight, kForward, Fp8Copy::Along::rows);
  const Fp8Copy x_copy(context, x, kForward, Fp8Copy::Along::rows);
  linear_forward(context.device, x_copy, weight_copy, y);
}

void project(const LayerContext& context, const Measured& x, const Measured& weight, const Tensor& residual, Tensor y) {
  if (!context.fp8) return linear_forward(context.device, x.matrix, weight.matrix, residual, y);
  const Fp8Copy weight_copy(context, weight, kForward, Fp8Copy::Along::rows);
  const Fp8Copy x_copy(context, x, kForward, Fp8Copy::Along::rows);
  linear_forward(context.device, x_copy, weight_copy, residual, y);
}

ProjectionBackward::ProjectionBackward(const LayerContext& context, const Measured& d_y)
    : context_(context), d_y_(d_y.matrix), copy_(context, d_y, kGradient, Fp8Copy::Along::both) {}

void ProjectionBackward::input(const Measured& weight, Tensor d_x, Accumulate accumulate) const {
  if (!context_.fp8) return linear_backward_input(context_.device, d_y_, weight.matrix, d_x, accumulate);
  const Fp8Copy weight_copy(context_, weight, kForward, Fp8Copy::Along::columns);
  linear_backward_input(context_.device, copy_, weight_copy, d_x, accumulate);
}

void ProjectionBackward::weight(const Measured& x, Tensor d_weight, Accumulate accumulate) const {
  if (!context_.fp8) return linear_backward_weight(context_.device, d_y_, x.matrix, d_weight, accumulate);
  const Fp8Copy x_copy(context_, x, kForward, Fp8Copy::Along::columns);
  linear_backward_weight(context_.device, copy_, x_copy, d_weight, accumulate);
}

}  // namespace farspan
