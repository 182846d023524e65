// SPDX-License-Identifier: Apache-2.0
#include "ops/dropout.h"

#include "base/philox.h"
#include "ops/cpu/kernels.h"
#include "ops/cuda/ops.h"
#include "ops/operand_checks.h"

namespace farspan {
namespace {

uint64_t first_words(const Philox::Block& words) { return static_cast<uint64_t>(words[1]) << 32 | words[0]; }

void check_rows(std::string_view op, std::string_view name, const Tensor& rows, const Shape& shape) {
  check_compute_dtype(op, name, rows);
  check_rank(op, name, rows, 2, 2);
  check_shape(op, name, rows, shape);
  check_dense_rows(op, name, rows);
}

// y = x + dropped(z), or dropped(z) where x is undefined.
void run_dropout(Device& device, std::string_view op, const Dropout& dropout, const Tensor& token_index,
                 const Tensor& x, std::string_view z_name, const Tensor& z, std::string_view y_name, const Tensor& y) {
  const DropoutRule rule(dropout.probability);
  const bool draws = dropout.probability > 0;
  check_rows(op, z_name, z, z.shape());
  check_rows(op, y_name, y, z.shape());
  if (x.defined()) check_rows(op, "x", x, z.shape());
  if (draws) {
    check_dtype(op, "token_index", token_index, DType::i64);
    check_shape(op, "token_index", token_index, Shape({z.dim(0)}));
    check_contiguous(op, "token_index", token_index);
  }
  // A block of four draws is some 60 integer operations; none of them counts as a floating-point one.
  const double flops = (x.defined() ? 2.0 : 1.0) * static_cast<double>(z.numel());
  const double bytes =
      static_cast<double>(z.bytes() + y.bytes() + (x.defined() ? x.bytes() : 0) + (draws ? token_index.bytes() : 0));
  device.run({op, OpClass::memory, flops, bytes}, [&] {
    if (device.on_cuda()) return cuda::dropout_add(device, dropout, token_index, x, z, y);
    cpu::DropoutRows rows{.z = cpu::RowView(z), .y = cpu::RowView(y), .z_dtype = z.dtype(), .y_dtype = y.dtype()};
    rows.has_x = x.defined();
    if (x.defined()) {
      rows.x = cpu::RowView(x);
      rows.x_dtype = x.dtype();
    }
    rows.token_index = draws ? token_index.data<int64_t>() : nullptr;
    rows.key = dropout.key;
    rows.rule = rule;
    parallel_for(device, z.dim(0), cpu::row_grain(z.dim(1)),
                 [&](int64_t begin, int64_t end) { cpu::dropout_rows(rows, begin, end); });
  });
}

}  // namespace

uint64_t dropout_key(int64_t seed, int64_t step, int64_t layer, std::string_view place) {
  const uint64_t of_step = first_words(Philox(static_cast<uint64_t>(seed), place).block(static_cast<uint64_t>(step)));
  return first_words(Philox(of_step, "dropout").block(static_cast<uint64_t>(layer)));
}

void dropout_add(Device& device, const Dropout& dropout, const Tensor& token_index, const Tensor& x, const Tensor& z,
                 Tensor y) {
  run_dropout(device, "dropout_add", dropout, token_index, x, "z", z, "y", y);
}

void dropout_backward(Device& device, const Dropout& dropout, const Tensor& token_index, const Tensor& d_y,
                      Tensor d_z) {
  run_dropout(device, "dropout_backward", dropout, token_index, Tensor(), "d_y", d_y, "d_z", d_z);
}

}  // namespace farspan
