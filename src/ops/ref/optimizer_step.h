// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/optimizer_step.h"
#include "ops/ref/matrix.h"

namespace farspan::ref {

// One step in fp64, as the formulas in ops/optimizer_step.h read; weight, m and v are updated.
void adamw_step(const AdamWStep& adamw, const Matrix& gradient, Matrix& weight, Matrix& m, Matrix& v);
void sgd_step(const SgdStep& sgd, const Matrix& gradient, Matrix& weight);

}  // namespace farspan::ref
