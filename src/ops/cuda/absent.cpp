// SPDX-License-Identifier: Apache-2.0
// In place of the rest of this folder where there is no CUDA toolkit. No device is of kind cuda there, so none of these
// is reached.
#include "base/error.h"
#include "ops/cuda/attention.h"
#include "ops/cuda/ops.h"

namespace farspan::cuda {
namespace {

[[noreturn]] void absent() { throw InternalError("an op of a CUDA device in a program built without CUDA"); }

}  // namespace

void rms_norm_forward(Device&, const Tensor&, const Tensor&, double, const Tensor&, const Tensor&, const Tensor&) {
  absent();
}
void rms_norm_backward(Device&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, Accumulate,
                       const Tensor&) {
  absent();
}

void rms_norm_rope_forward(Device&, const Tensor&, const Tensor&, double, const Tensor&, RopeStyle, const Tensor&,
                           const Tensor&) {
  absent();
}
void rms_norm_rope_backward(Device&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                            RopeStyle, const Tensor&, const Tensor&) {
  absent();
}

void key_intervals(Device&, std::span<const KeyPiece>, std::span<const QueryRange>, const Tensor&, const Tensor&,
                   const Tensor&, const Tensor&) {
  absent();
}

void rope_table(Device&, const Tensor&, std::span<const double>, double, const Tensor&) { absent(); }
void rope_apply(Device&, const Tensor&, RopeStyle, RopeDirection, const Tensor&) { absent(); }

void swiglu_forward(Device&, const Tensor&, const Tensor&, const Tensor&) { absent(); }
void swiglu_backward(Device&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                     const Tensor&) {
  absent();
}

void bias_add(Device&, const Tensor&, const Tensor&) { absent(); }
void bias_backward(Device&, const Tensor&, const Tensor&) { absent(); }

void add(Device&, const Tensor&, const Tensor&, const Tensor&) { absent(); }
void cast(Device&, const Tensor&, const Tensor&) { absent(); }
void fill(Device&, const Tensor&, double) { absent(); }
void scale(Device&, const Tensor&, double) { absent(); }

void dropout_add(Device&, const Dropout&, const Tensor&, const Tensor&, const Tensor&, const Tensor&) { absent(); }

void embedding_forward(Device&, const Tensor&, const Tensor&, const VocabularyPart&, const Tensor&) { absent(); }
void embedding_backward(Device&, const Tensor&, const Tensor&, const VocabularyPart&, const Tensor&) { absent(); }

void cross_entropy(Device&, const Tensor&, const Tensor&, double, const Tensor&, const Tensor&) { absent(); }
void vocabulary_statistics(Device&, const Tensor&, const Tensor&, const VocabularyPart&, const Tensor&) { absent(); }
void combine_statistics(Device&, const Tensor&, const Tensor&, const Tensor&, const Tensor&) { absent(); }
void vocabulary_gradient(Device&, const Tensor&, const Tensor&, const VocabularyPart&, const Tensor&, double,
                         const Tensor&) {
  absent();
}
void token_loss_sum(Device&, const Tensor&, const Tensor&) { absent(); }
void sum_of_squares(Device&, std::span<const Tensor>, const Tensor&) { absent(); }

void adamw_step(Device&, const AdamWStep&, std::span<const AdamWTensors>) { absent(); }
void sgd_step(Device&, const SgdStep&, const Tensor&, const Tensor&, const Tensor&) { absent(); }

void fp8_quantise(Device&, const Tensor&, const Tensor&, const Fp8Matrix&) { absent(); }
void largest_magnitudes(Device&, std::span<const Tensor>, const Tensor&) { absent(); }

GemmOutcome gemm_cublaslt(Device&, const GemmProblem&) { absent(); }
GemmOutcome gemm_reference(Device&, const GemmProblem&) { absent(); }
void set_gemm_choice(Device&, GemmChoice) { absent(); }

std::span<const AttentionImplementation> attention_implementation_list() { return {}; }
void attention_delta(Device&, const Tensor&, const Tensor&, const Tensor&) { absent(); }
bool attention_reads_delta(const Device&, const AttentionBlock&) { absent(); }

}  // namespace farspan::cuda
