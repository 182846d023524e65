// SPDX-License-Identifier: Apache-2.0
#include "ops/ref/optimizer_step.h"

#include <cmath>

namespace farspan::ref {

void adamw_step(const AdamWStep& adamw, const Matrix& gradient, Matrix& weight, Matrix& m, Matrix& v) {
  const double correction1 = 1 - std::pow(adamw.beta1, static_cast<double>(adamw.step));
  const double correction2 = 1 - std::pow(adamw.beta2, static_cast<double>(adamw.step));
  for (size_t i = 0; i < weight.values.size(); ++i) {
    const double g = gradient.values[i] * adamw.gradient_scale;
    weight.values[i] *= 1 - adamw.lr * adamw.weight_decay;
    m.values[i] = adamw.beta1 * m.values[i] + (1 - adamw.beta1) * g;
    v.values[i] = adamw.beta2 * v.values[i] + (1 - adamw.beta2) * g * g;
    weight.values[i] -= adamw.lr * (m.values[i] / correction1) / (std::sqrt(v.values[i] / correction2) + adamw.epsilon);
  }
}

void sgd_step(const SgdStep& sgd, const Matrix& gradient, Matrix& weight) {
  for (size_t i = 0; i < weight.values.size(); ++i) {
    weight.values[i] *= 1 - sgd.lr * sgd.weight_decay;
    weight.values[i] -= sgd.lr * gradient.values[i] * sgd.gradient_scale;
  }
}

}  // namespace farspan::ref
