// SPDX-License-Identifier: Apache-2.0
// The CPU loops that are written with vectors and picked for the machine at run time (Highway). Each works on the given
// range of rows or elements on the calling thread; ops check their operands and split the ranges.
#pragma once

#include <cstdint>

#include "ops/accumulate.h"
#include "ops/cpu/row_view.h"
#include "ops/dropout_rule.h"
#include "ops/optimizer_step.h"
#include "tensor/dtype.h"

namespace farspan::cpu {

struct RmsNormForward {
  RowView x, y;
  DType dtype;
  const void* weight;
  DType weight_dtype;
  double epsilon;
  float* rstd;
};
void rms_norm_forward(const RmsNormForward& norm, int64_t begin, int64_t end);

struct RmsNormBackward {
  RowView d_y, x, d_x;
  DType dtype;
  const void* weight;
  DType weight_dtype;
  const float* rstd;
  Accumulate accumulate_d_x;
};
// Adds these rows' share of the weight gradient to d_weight[0, columns).
void rms_norm_backward(const RmsNormBackward& norm, int64_t begin, int64_t end, float* d_weight);

struct SwiGlu {
  RowView gate_up, d_y;  // d_y: backward only
  RowView out;           // y or d_gate_up
  DType dtype;
  RowView y = {};  // backward: where y is written once more, if has_y
  bool has_y = false;
};
void swiglu_forward(const SwiGlu& swiglu, int64_t begin, int64_t end);
void swiglu_backward(const SwiGlu& swiglu, int64_t begin, int64_t end);

struct CrossEntropy {
  RowView logits;
  const int32_t* targets;
  double gradient_scale;
  float* token_loss;
  RowView d_logits;
  enum class Gradient { none, f32, bf16 } gradient;
};
void cross_entropy(const CrossEntropy& loss, int64_t begin, int64_t end);

// `targets` are global ids; column i of the logits is id first_id + i.
struct VocabularyStatistics {
  RowView logits;
  const int32_t* targets;
  int64_t first_id;
  float* lse;
  float* target_logit;
};
void vocabulary_statistics(const VocabularyStatistics& statistics, int64_t begin, int64_t end);

struct VocabularyGradient {
  RowView logits;
  const int32_t* targets;
  int64_t first_id;
  const float* lse;
  double gradient_scale;
  RowView d_logits;
  DType dtype;  // of d_logits
};
void vocabulary_gradient(const VocabularyGradient& gradient, int64_t begin, int64_t end);

// y = x + dropped(z), or dropped(z) without x. token_index null: nothing is dropped.
struct DropoutRows {
  RowView x = {}, z, y;
  DType x_dtype = DType::f32, z_dtype, y_dtype;
  bool has_x = false;
  const int64_t* token_index = nullptr;
  uint64_t key = 0;
  DropoutRule rule = {};
};
void dropout_rows(const DropoutRows& rows, int64_t begin, int64_t end);

// n elements of dense rows.
void cast_elements(const void* x, DType x_dtype, void* y, DType y_dtype, int64_t n);
void add_elements(const void* a, DType a_dtype, const void* b, DType b_dtype, void* y, DType y_dtype, int64_t n);

// In fp64; the order of the sum depends on n only.
double sum_of_squares(const float* x, int64_t n);

// Where the new weight is written once more; no data: nowhere.
struct WeightCopy {
  void* data = nullptr;
  DType dtype = DType::f32;
};

// n elements from each pointer.
void adamw_elements(const AdamWStep& adamw, const float* gradient, float* weight, float* m, float* v, WeightCopy copy,
                    int64_t n);
void sgd_elements(const SgdStep& sgd, const float* gradient, float* weight, WeightCopy copy, int64_t n);

}  // namespace farspan::cpu
