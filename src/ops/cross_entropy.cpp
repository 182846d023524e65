// SPDX-License-Identifier: Apache-2.0
#include "ops/cross_entropy.h"

#include "ops/cpu/kernels.h"
#include "ops/operand_checks.h"

namespace farspan {
namespace {

constexpr std::string_view kOp = "cross_entropy";

void check_operands(const Tensor& logits, const Tensor& targets, const Tensor& token_loss, const Tensor& d_logits) {
  check_dtype(kOp, "logits", logits, DType::f32);
  check_rank(kOp, "logits", logits, 2, 2);
  check_dense_rows(kOp, "logits", logits);
  const Shape rows({logits.dim(0)});
  check_dtype(kOp, "targets", targets, DType::i32);
  check_shape(kOp, "targets", targets, rows);
  check_contiguous(kOp, "targets", targets);
  check_dtype(kOp, "token_loss", token_loss, DType::f32);
  check_shape(kOp, "token_loss", token_loss, rows);
  check_contiguous(kOp, "token_loss", token_loss);
  if (!d_logits.defined()) return;
  check_compute_dtype(kOp, "d_logits", d_logits);
  check_shape(kOp, "d_logits", d_logits, logits.shape());
  check_dense_rows(kOp, "d_logits", d_logits);
}

void check_targets(const Tensor& targets, int64_t vocabulary) {
  const int32_t* ids = targets.data<int32_t>();
  for (int64_t i = 0; i < targets.dim(0); ++i)
    if (ids[i] < -1 || ids[i] >= vocabulary)
      throw DataError(fmt::format("cross_entropy: target {} has id {}; expected 0 to {}, or -1 to ignore it", i, ids[i],
                                  vocabulary - 1));
}

}  // namespace

void cross_entropy(Device& device, Tensor logits, const Tensor& targets, double gradient_scale, Tensor token_loss,
                   Tensor d_logits) {
  check_operands(logits, targets, token_loss, d_logits);
  const double flops = (d_logits.defined() ? 6.0 : 4.0) * static_cast<double>(logits.numel());
  const double bytes = static_cast<double>(logits.bytes() + (d_logits.defined() ? d_logits.bytes() : 0) +
                                           targets.bytes() + token_loss.bytes());
  device.run({"cross_entropy", OpClass::memory, flops, bytes}, [&] {
    check_targets(targets, logits.dim(1));
    using Gradient = cpu::CrossEntropy::Gradient;
    cpu::CrossEntropy loss{cpu::RowView(logits), targets.data<int32_t>(), gradient_scale, token_loss.data<float>(), {},
                           Gradient::none};
    if (d_logits.defined()) {
      loss.d_logits = cpu::RowView(d_logits);
      loss.gradient = d_logits.dtype() == DType::f32 ? Gradient::f32 : Gradient::bf16;
    }
    parallel_for(device, logits.dim(0), cpu::row_grain(logits.dim(1)),
                 [&](int64_t begin, int64_t end) { cpu::cross_entropy(loss, begin, end); });
  });
}

double token_loss_sum(Device& device, const Tensor& token_loss) {
  check_dtype("token_loss_sum", "token_loss", token_loss, DType::f32);
  check_rank("token_loss_sum", "token_loss", token_loss, 1, 1);
  check_contiguous("token_loss_sum", "token_loss", token_loss);
  const double elements = static_cast<double>(token_loss.numel());
  double sum = 0;
  device.run({"token_loss_sum", OpClass::memory, elements, 4.0 * elements}, [&] {
    const float* loss = token_loss.data<float>();
    for (int64_t i = 0; i < token_loss.dim(0); ++i) sum += static_cast<double>(loss[i]);
  });
  return sum;
}

}  // namespace farspan
