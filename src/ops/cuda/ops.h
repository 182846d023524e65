// SPDX-License-Identifier: Apache-2.0
// The bodies of the ops on a CUDA device, with the arguments of the op itself, already checked. Each queues its kernels
// on the device's compute stream and returns; none waits. Where an op's cost asks for scratch (ops/cuda/scratch.h), the
// body finds it at Device::scratch.
//
// All sums are fp32 or wider and in a fixed order: the same bits every time, except where an op says otherwise. Ids of
// tokens and targets cannot be looked at without waiting for the device, so those outside the vocabulary are left out
// (treated as of another rank) here; the loader checks them before they are sent.
#pragma once

#include <cstdint>
#include <span>

#include "ops/attention.h"
#include "ops/cross_entropy.h"
#include "ops/dropout.h"
#include "ops/embedding.h"
#include "ops/fp8.h"
#include "ops/gemm.h"
#include "ops/gemm_problem.h"
#include "ops/key_intervals.h"
#include "ops/optimizer_step.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"

namespace farspan::cuda {

// Every amax here (ops/amax.h) may be undefined.
void rms_norm_forward(Device& device, const Tensor& x, const Tensor& weight, double epsilon, const Tensor& y,
                      const Tensor& rstd, const Tensor& amax);
void rms_norm_backward(Device& device, const Tensor& d_y, const Tensor& x, const Tensor& weight, const Tensor& rstd,
                       const Tensor& d_x, Accumulate accumulate_d_x, const Tensor& d_weight);

// Heads of a power of two of 32 bytes, at most 1 KiB, and a weight of their type; addresses and strides are multiples
// of 16 bytes.
void rms_norm_rope_forward(Device& device, const Tensor& x, const Tensor& weight, double epsilon, const Tensor& table,
                           RopeStyle style, const Tensor& y, const Tensor& rstd);
void rms_norm_rope_backward(Device& device, const Tensor& d_y, const Tensor& x, const Tensor& weight,
                            const Tensor& rstd, const Tensor& table, RopeStyle style, const Tensor& d_x,
                            const Tensor& d_weight);

void key_intervals(Device& device, std::span<const KeyPiece> pieces, std::span<const QueryRange> queries,
                   const Tensor& lo, const Tensor& hi, const Tensor& key_lo, const Tensor& key_hi);

void rope_table(Device& device, const Tensor& positions, std::span<const double> inverse_frequencies,
                double attention_factor, const Tensor& table);
void rope_apply(Device& device, const Tensor& table, RopeStyle style, RopeDirection direction, const Tensor& x);

void swiglu_forward(Device& device, const Tensor& gate_up, const Tensor& y, const Tensor& amax);
// y undefined: not written.
void swiglu_backward(Device& device, const Tensor& gate_up, const Tensor& d_y, const Tensor& d_gate_up, const Tensor& y,
                     const Tensor& d_amax, const Tensor& amax);

void bias_add(Device& device, const Tensor& bias, const Tensor& y);
void bias_backward(Device& device, const Tensor& d_y, const Tensor& d_bias);

void add(Device& device, const Tensor& a, const Tensor& b, const Tensor& y);
void cast(Device& device, const Tensor& x, const Tensor& y);
void fill(Device& device, const Tensor& x, double value);
void scale(Device& device, const Tensor& x, double factor);

// amax undefined: found first, in the scratch.
void fp8_quantise(Device& device, const Tensor& x, const Tensor& amax, const Fp8Matrix& to);
void largest_magnitudes(Device& device, std::span<const Tensor> matrices, const Tensor& amax);

// Both directions; x is undefined in the backward one.
void dropout_add(Device& device, const Dropout& dropout, const Tensor& token_index, const Tensor& x, const Tensor& z,
                 const Tensor& y);

void embedding_forward(Device& device, const Tensor& tokens, const Tensor& weight, const VocabularyPart& part,
                       const Tensor& y);
void embedding_backward(Device& device, const Tensor& tokens, const Tensor& d_y, const VocabularyPart& part,
                        const Tensor& d_weight);

void cross_entropy(Device& device, const Tensor& logits, const Tensor& targets, double gradient_scale,
                   const Tensor& token_loss, const Tensor& d_logits);
void vocabulary_statistics(Device& device, const Tensor& logits, const Tensor& targets, const VocabularyPart& part,
                           const Tensor& statistics);
void combine_statistics(Device& device, const Tensor& all, const Tensor& targets, const Tensor& lse,
                        const Tensor& token_loss);
void vocabulary_gradient(Device& device, const Tensor& logits, const Tensor& targets, const VocabularyPart& part,
                         const Tensor& lse, double gradient_scale, const Tensor& d_logits);
// Adds to the f64 at `sum`, on the device.
void token_loss_sum(Device& device, const Tensor& token_loss, const Tensor& sum);
// Adds to the f64 at `sum`, on the device.
void sum_of_squares(Device& device, std::span<const Tensor> tensors, const Tensor& sum);

void adamw_step(Device& device, const AdamWStep& adamw, std::span<const AdamWTensors> tensors);
void sgd_step(Device& device, const SgdStep& sgd, const Tensor& gradient, const Tensor& weight,
              const Tensor& compute_weight);

// The GEMM implementations (ops/gemm.cpp), in the order they are tried. The first declines what cuBLASLt has no kernel
// for and products with nothing to sum (k = 0); the second takes everything, slowly.
GemmOutcome gemm_cublaslt(Device& device, const GemmProblem& problem);
GemmOutcome gemm_reference(Device& device, const GemmProblem& problem);
void set_gemm_choice(Device& device, GemmChoice choice);

void attention_state_init(Device& device, const Tensor& out, const Tensor& lse);
void attention_delta(Device& device, const Tensor& out, const Tensor& d_out, const Tensor& delta);

}  // namespace farspan::cuda
