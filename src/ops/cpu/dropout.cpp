// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ops/cpu/kernels.h"
#include "ops/operand_checks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/dropout.cpp"
#include "hwy/foreach_target.h"
// After foreach_target, which sets the target it is compiled for.
#include "ops/cpu/philox-inl.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace farspan::cpu {
namespace HWY_NAMESPACE {

// Channels whose factors are held at once: 1 KiB, and a multiple of what one vector of counters draws.
constexpr int64_t kChannels = 256;

// y = x + z * factor; where the factor is 0, z is not looked at.
template <typename X, typename Z, typename Y>
void add_kept(const X* x, const Z* z, Y* y, const float* factors, int64_t n) {
  for_vectors(n, [&](int64_t i, int64_t count) HWY_ATTR {
    const auto factor = load(factors + i, count);
    const auto kept = hn::IfThenZeroElse(hn::Eq(factor, hn::Zero(F32())), hn::Mul(load(z + i, count), factor));
    store(x == nullptr ? kept : hn::Add(load(x + i, count), kept), y + i, count);
  });
}

void dropout_rows_target(const DropoutRows& rows, int64_t begin, int64_t end) {
  float factors[kChannels];
  std::fill_n(factors, kChannels, 1.0f);
  for (int64_t row = begin; row < end; ++row)
    for (int64_t first = 0; first < rows.y.columns(); first += kChannels) {
      const int64_t n = std::min(kChannels, rows.y.columns() - first);
      if (rows.token_index != nullptr)
        dropout_factors(rows.key, static_cast<uint64_t>(rows.token_index[row]), first, n, rows.rule, factors);
      with_compute_type(rows.x_dtype, [&](auto x) {
        with_compute_type(rows.z_dtype, [&](auto z) {
          with_compute_type(rows.y_dtype, [&](auto y) {
            add_kept(rows.has_x ? rows.x.row<decltype(x)>(row) + first : nullptr, rows.z.row<decltype(z)>(row) + first,
                     rows.y.row<decltype(y)>(row) + first, factors, n);
          });
        });
      });
    }
}

}  // namespace HWY_NAMESPACE
}  // namespace farspan::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace farspan::cpu {

HWY_EXPORT(dropout_rows_target);

void dropout_rows(const DropoutRows& rows, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(dropout_rows_target)(rows, begin, end);
}

}  // namespace farspan::cpu
#endif
