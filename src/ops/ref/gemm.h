// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/gemm_problem.h"

namespace farspan::ref {

// Rows [begin, end) of the product, one dot product in fp64 per element. Any GemmProblem.
void gemm_rows(const GemmProblem& problem, int64_t begin, int64_t end);

}  // namespace farspan::ref
