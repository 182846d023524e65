// SPDX-License-Identifier: Apache-2.0
#include "ops/norms.h"

#include <algorithm>
#include <vector>

#include "base/math.h"
#include "ops/cpu/kernels.h"
#include "ops/operand_checks.h"

namespace farspan {
namespace {

// Elements per partial sum; the partial sums are added in order. 64 Ki elements keep the list short (8 KiB per GiB).
constexpr int64_t kBlock = 65536;

}  // namespace

double sum_of_squares(Device& device, const Tensor& x) {
  check_dtype("sum_of_squares", "x", x, DType::f32);
  check_contiguous("sum_of_squares", "x", x);
  const double elements = static_cast<double>(x.numel());
  double sum = 0;
  device.run({"sum_of_squares", OpClass::memory, 2 * elements, 4 * elements}, [&] {
    const int64_t n = x.numel();
    std::vector<double> partial(static_cast<size_t>(ceil_div(n, kBlock)));
    parallel_for(device, static_cast<int64_t>(partial.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * kBlock;
        partial[static_cast<size_t>(block)] = cpu::sum_of_squares(x.data<float>() + first, std::min(kBlock, n - first));
      }
    });
    for (double share : partial) sum += share;
  });
  return sum;
}

}  // namespace farspan
