// SPDX-License-Identifier: Apache-2.0
#include "ops/rms_norm.h"

#include <algorithm>
#include <vector>

#include "base/math.h"
#include "ops/amax.h"
#include "ops/cpu/amax.h"
#include "ops/cpu/kernels.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/scratch.h"
#include "ops/operand_checks.h"

namespace farspan {
namespace {

// The weight gradient is summed in this many blocks of rows (fewer when that would leave a block under kRowsPerBlock):
// enough for any number of threads to share, and scratch of at most 64 rows whatever the sequence length.
constexpr int64_t kWeightBlocks = 64;
constexpr int64_t kRowsPerBlock = 16;

Shape row_shape(const Tensor& x) { return x.rank() == 2 ? Shape({x.dim(0)}) : Shape({x.dim(0), x.dim(1)}); }

void check_matching(std::string_view op, std::string_view operand, const Tensor& tensor, const Tensor& x) {
  check_shape(op, operand, tensor, x.shape());
  check_dtype(op, operand, tensor, x.dtype());
  check_dense_rows(op, operand, tensor);
}

void check_operands(std::string_view op, const Tensor& x, const Tensor& weight, const Tensor& rstd) {
  check_compute_dtype(op, "x", x);
  check_rank(op, "x", x, 2, 3);
  check_dense_rows(op, "x", x);
  check_compute_dtype(op, "weight", weight);
  check_shape(op, "weight", weight, Shape({x.dim(-1)}));
  check_contiguous(op, "weight", weight);
  check_dtype(op, "rstd", rstd, DType::f32);
  check_shape(op, "rstd", rstd, row_shape(x));
  check_contiguous(op, "rstd", rstd);
}

}  // namespace

void rms_norm_forward(Device& device, const Tensor& x, const Tensor& weight, double epsilon, Tensor y, Tensor rstd,
                      Tensor amax) {
  check_operands("rms_norm_forward", x, weight, rstd);
  check_matching("rms_norm_forward", "y", y, x);
  check_amax("rms_norm_forward", "amax", amax);
  const double flops = 4.0 * static_cast<double>(x.numel());
  const double bytes = static_cast<double>(x.bytes() + y.bytes() + weight.bytes() + rstd.bytes() + amax_bytes(amax));
  device.run({"rms_norm_forward", OpClass::memory, flops, bytes}, [&] {
    if (device.on_cuda()) return cuda::rms_norm_forward(device, x, weight, epsilon, y, rstd, amax);
    const cpu::RmsNormForward norm{cpu::RowView(x), cpu::RowView(y), x.dtype(),         weight.raw(),
                                   weight.dtype(),  epsilon,         rstd.data<float>()};
    if (amax.defined()) *amax.data<float>() = 0;
    parallel_for(device, norm.x.rows(), cpu::row_grain(norm.x.columns()), [&](int64_t begin, int64_t end) {
      cpu::rms_norm_forward(norm, begin, end);
      if (amax.defined()) cpu::raise_amax(norm.y, norm.dtype, begin, end, *amax.data<float>());
    });
  });
}

void rms_norm_backward(Device& device, const Tensor& d_y, const Tensor& x, const Tensor& weight, const Tensor& rstd,
                       Tensor d_x, Accumulate accumulate_d_x, Tensor d_weight) {
  check_operands("rms_norm_backward", x, weight, rstd);
  check_matching("rms_norm_backward", "d_y", d_y, x);
  check_matching("rms_norm_backward", "d_x", d_x, x);
  check_dtype("rms_norm_backward", "d_weight", d_weight, DType::f32);
  check_shape("rms_norm_backward", "d_weight", d_weight, weight.shape());
  check_contiguous("rms_norm_backward", "d_weight", d_weight);
  const double flops = 11.0 * static_cast<double>(x.numel());
  const int64_t d_x_passes = accumulate_d_x == Accumulate::yes ? 2 : 1;
  const double bytes = static_cast<double>(d_y.bytes() + x.bytes() + d_x_passes * d_x.bytes() + weight.bytes() +
                                           rstd.bytes() + 2 * d_weight.bytes());
  const int64_t scratch = device.targets_cuda() ? cuda::rms_norm_backward_scratch(rstd.numel(), x.dim(-1)) : 0;
  device.run({"rms_norm_backward", OpClass::memory, flops, bytes, scratch}, [&] {
    if (device.on_cuda()) return cuda::rms_norm_backward(device, d_y, x, weight, rstd, d_x, accumulate_d_x, d_weight);
    const cpu::RmsNormBackward norm{cpu::RowView(d_y), cpu::RowView(x), cpu::RowView(d_x),  x.dtype(),
                                    weight.raw(),      weight.dtype(),  rstd.data<float>(), accumulate_d_x};
    const int64_t rows = norm.x.rows(), columns = norm.x.columns();
    const int64_t blocks = std::clamp<int64_t>(rows / kRowsPerBlock, 1, kWeightBlocks);
    std::vector<float> partial(static_cast<size_t>(blocks * columns), 0.0f);
    parallel_for(device, blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block)
        cpu::rms_norm_backward(norm, rows * block / blocks, rows * (block + 1) / blocks,
                               partial.data() + block * columns);
    });
    float* sum = d_weight.data<float>();
    for (int64_t i = 0; i < columns; ++i) {
      double total = 0;
      for (int64_t block = 0; block < blocks; ++block)
        total += static_cast<double>(partial[static_cast<size_t>(block * columns + i)]);
      sum[i] += static_cast<float>(total);
    }
  });
}

}  // namespace farspan
