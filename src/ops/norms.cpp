// SPDX-License-Identifier: Apache-2.0
#include "ops/norms.h"

#include <algorithm>
#include <vector>

#include "base/math.h"
#include "ops/cpu/kernels.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/scratch.h"
#include "ops/operand_checks.h"

namespace farspan {
namespace {

// Elements per partial sum; the partial sums are added in order. 64 Ki elements keep the list short (8 KiB per GiB).
constexpr int64_t kBlock = 65536;

double squares_on_cpu(const Device& device, const Tensor& x) {
  const int64_t n = x.numel();
  std::vector<double> partial(static_cast<size_t>(ceil_div(n, kBlock)));
  parallel_for(device, static_cast<int64_t>(partial.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock;
      partial[static_cast<size_t>(block)] = cpu::sum_of_squares(x.data<float>() + first, std::min(kBlock, n - first));
    }
  });
  double sum = 0;
  for (double share : partial) sum += share;
  return sum;
}

}  // namespace

void sum_of_squares(Device& device, const Tensor& x, Tensor sum) { sum_of_squares(device, std::span(&x, 1), sum); }

void sum_of_squares(Device& device, std::span<const Tensor> tensors, Tensor sum) {
  constexpr std::string_view op = "sum_of_squares";
  double elements = 0;
  for (const Tensor& x : tensors) {
    check_dtype(op, "x", x, DType::f32);
    check_contiguous(op, "x", x);
    elements += static_cast<double>(x.numel());
  }
  check_dtype(op, "sum", sum, DType::f64);
  check_shape(op, "sum", sum, Shape({1}));
  const int64_t scratch = device.targets_cuda() ? cuda::partial_sums_scratch() : 0;
  device.run({op, OpClass::memory, 2 * elements, 4 * elements + 16, scratch}, [&] {
    if (device.on_cuda()) return cuda::sum_of_squares(device, tensors, sum);
    for (const Tensor& x : tensors) *sum.data<double>() += squares_on_cpu(device, x);
  });
}

}  // namespace farspan
