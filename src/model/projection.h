// SPDX-License-Identifier: Apache-2.0
// The products of a decoder layer's linear weights, in the precision of the run. With fp8 each operand is copied to 8
// bits first (ops/fp8.h): what comes forward, x and weight, to f8e4m3; the gradient d_y, whose values span more powers
// of two, to f8e5m2. Results stay what they are: activations bf16, gradients of weights fp32. Embedding and head, norms
// and attention are as with bf16.
#pragma once

#include "model/layer_context.h"
#include "ops/accumulate.h"
#include "ops/amax.h"
#include "ops/fp8.h"

namespace farspan {

// Room for the amax of each of `count` matrices. Untaken unless the run is in fp8.
Buffer take_amax(const LayerContext& context, std::string_view name, int64_t count, Purpose purpose);
// The same for matrices of the hidden stream's tokens. Untaken too under sequence parallelism, where products read the
// gathered tokens of all ranks and a rank measures its own.
Buffer take_stream_amax(const LayerContext& context, std::string_view name, int64_t count, Purpose purpose);
// Of the matrix `index`; undefined where there is no room for it.
Tensor amax_of(const Buffer& room, int64_t index = 0);

// A matrix's copies in fp8, in buffers of the arena; none where the run is not in fp8.
class Fp8Copy {
 public:
  enum class Along { rows, columns, both };  // the dimension that the products of this copy sum over
  Fp8Copy(const LayerContext& context, const Measured& x, DType dtype, Along along);
  operator const Fp8Matrix&() const { return matrix_; }  // NOLINT: a copy is used wherever a matrix is

 private:
  Buffer values_, transposed_, scale_;
  Fp8Matrix matrix_;
};

// y (T, O) = x (T, I) weight (O, I)^T, plus the residual (T, O) where there is one, which may be y itself.
void project(const LayerContext& context, const Measured& x, const Measured& weight, Tensor y);
void project(const LayerContext& context, const Measured& x, const Measured& weight, const Tensor& residual, Tensor y);

// The two products that read d_y (T, O), which must stay as it is between them unless the run is in fp8.
class ProjectionBackward {
 public:
  ProjectionBackward(const LayerContext& context, const Measured& d_y);
  // d_x (T, I) = d_y weight
  void input(const Measured& weight, Tensor d_x, Accumulate accumulate) const;
  // d_weight (O, I) = d_y^T x
  void weight(const Measured& x, Tensor d_weight, Accumulate accumulate) const;

 private:
  const LayerContext& context_;
  Tensor d_y_;
  Fp8Copy copy_;
};

}  // namespace farspan
