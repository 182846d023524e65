// SPDX-License-Identifier: Apache-2.0
#include "ops/optimizer_step.h"

#include <memory>

#include "ops/ref/optimizer_step.h"
#include "tests/ops/operand.h"

namespace farspan {
namespace {

using test::expect_close;
using test::Operand;

// One weight through one step at a time.
struct OneWeight {
  explicit OneWeight(double value) { weight.set({value}), m.set({0}), v.set({0}); }
  double step(const AdamWStep& adamw, double g) {
    gradient.set({g});
    adamw_step(device, adamw, gradient, weight, m, v, Tensor());
    return weight.values()[0];
  }
  Device device{test::test_device_kind(), 1};
  Operand gradient{DType::f32, Shape{1}}, weight{DType::f32, Shape{1}}, m{DType::f32, Shape{1}},
      v{DType::f32, Shape{1}};
};

TEST(OptimizerStep, B071_EpsilonIsAddedAfterBiasCorrection) {
  OneWeight one(2.0);
  EXPECT_NEAR(one.step({.lr = 0.1, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .step = 1}, 3e-8), 1.925, 1e-6);
}

TEST(OptimizerStep, B072_DecayComesBeforeTheUpdate) {
  OneWeight one(2.0);
  AdamWStep adamw{.lr = 0.1, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.2, .step = 1};
  EXPECT_NEAR(one.step(adamw, 0.5), 1.860000, 1e-6);
  adamw.step = 2;
  EXPECT_NEAR(one.step(adamw, -0.25), 1.795963, 1e-6);
}

TEST(OptimizerStep, B073_ZeroGradientLeavesWeightsToTheDecayAlone) {
  Device device(test::test_device_kind(), 2);
  Operand gradient(DType::f32, Shape{257}), weight(DType::f32, Shape{257}), m(DType::f32, Shape{257}),
      v(DType::f32, Shape{257});
  gradient.constant(0), weight.random(1), m.constant(0), v.constant(0);
  const std::vector<double> before = weight.values();
  adamw_step(device, {.lr = 0.1, .weight_decay = 0}, gradient, weight, m, v, Tensor());
  EXPECT_EQ(weight.values(), before) << "no decay: not one bit moves";
  adamw_step(device, {.lr = 0.1, .weight_decay = 0.1}, gradient, weight, m, v, Tensor());
  for (size_t i = 0; i < before.size(); ++i)
    EXPECT_NEAR(weight.values()[i], 0.99 * before[i], 1.2e-7 * std::abs(before[i]));
}

TEST(OptimizerStep, AdamWMatchesReferenceOverSteps) {
  Device device(test::test_device_kind(), 2);
  for (const int64_t n : {1, 3, 17, 257}) {
    Operand gradient(DType::f32, Shape{n}), weight(DType::f32, Shape{n}), m(DType::f32, Shape{n}),
        v(DType::f32, Shape{n});
    Operand compute(DType::bf16, Shape{n});
    weight.random(1), m.constant(0), v.constant(0);
    ref::Matrix expected = weight.matrix(), expected_m = m.matrix(), expected_v = v.matrix();
    for (int64_t step = 1; step <= 5; ++step) {
      gradient.random(static_cast<uint64_t>(10 + step), 1e-3);
      const AdamWStep adamw{.lr = 3e-3, .weight_decay = 0.1, .step = step, .gradient_scale = 0.3};
      ref::adamw_step(adamw, gradient.matrix(), expected, expected_m, expected_v);
      adamw_step(device, adamw, gradient, weight, m, v, compute);
    }
    expect_close(weight, expected, "weight");
    expect_close(m, expected_m, "m");
    expect_close(v, expected_v, "v");
    for (size_t i = 0; i < static_cast<size_t>(n); ++i)
      EXPECT_EQ(compute.values()[i],
                static_cast<double>(to_float(to_bfloat16(static_cast<float>(weight.values()[i])))));
  }
}

TEST(OptimizerStep, SgdMatchesReference) {
  Device device(test::test_device_kind(), 2);
  Operand gradient(DType::f32, Shape{3, 10}), weight(DType::f32, Shape{3, 10}), compute(DType::bf16, Shape{3, 10});
  gradient.random(1), weight.random(2);
  const SgdStep sgd{.lr = 0.5, .weight_decay = 0.1, .gradient_scale = 0.7};
  ref::Matrix expected = weight.matrix();
  ref::sgd_step(sgd, gradient.matrix(), expected);
  sgd_step(device, sgd, gradient, weight, compute);
  expect_close(weight, expected, "weight");
  expect_close(compute, expected, "compute_weight");
}

// The copy that the model reads is the new weight in its own type, and having one changes nothing else.
TEST(OptimizerStep, TheCopyMayHaveEitherType) {
  Device device(test::test_device_kind(), 2);
  constexpr int64_t kCount = 37;
  std::vector<std::vector<double>> weights_of[2];
  for (const DType copy_type : {DType::f32, DType::bf16, DType::i32 /* no copy */}) {
    const bool copies = copy_type != DType::i32;
    Operand gradient(DType::f32, Shape{kCount}), adam(DType::f32, Shape{kCount}), m(DType::f32, Shape{kCount}),
        v(DType::f32, Shape{kCount}), plain(DType::f32, Shape{kCount});
    Operand copy(copies ? copy_type : DType::f32, Shape{kCount});
    gradient.random(1), adam.random(2), m.random(3, 0.1), v.constant(0.01), plain.random(4);
    for (Operand* weight : {&adam, &plain}) {
      const Tensor out = copies ? copy.tensor() : Tensor();
      if (weight == &adam)
        adamw_step(device, {.lr = 0.1, .weight_decay = 0.1, .step = 3}, gradient, *weight, m, v, out);
      else
        sgd_step(device, {.lr = 0.1, .weight_decay = 0.1}, gradient, *weight, out);
      weights_of[weight == &adam].push_back(weight->values());
      if (!copies) continue;
      for (size_t i = 0; i < kCount; ++i) {
        const float w = static_cast<float>(weight->values()[i]);
        EXPECT_EQ(copy.values()[i], copy_type == DType::f32 ? w : to_float(to_bfloat16(w)));
      }
    }
  }
  for (const auto& weights : weights_of) {
    EXPECT_EQ(weights[0], weights[1]);
    EXPECT_EQ(weights[0], weights[2]);
  }
}

// Many parameters of any size, address, copy and decay at once: the bits of one step after the other.
TEST(OptimizerStep, ManyParametersInOneCall) {
  struct Parameter {
    Parameter(int64_t i, int64_t n)
        : gradient(DType::f32, Shape{n}),
          weight(DType::f32, Shape{n}),
          m(DType::f32, Shape{n}),
          v(DType::f32, Shape{n}),
          copy(i % 3 == 0 ? DType::f32 : DType::bf16, Shape{n}),
          first(i % 4 == 1 && n > 0 ? 1 : 0),
          copies(i % 3 != 2),
          decay(i % 2 == 0 ? 0.1 : 0) {
      const uint64_t seed = static_cast<uint64_t>(i);
      gradient.random(seed), weight.random(seed + 1000), m.random(seed + 2000, 0.1), v.constant(0.01), copy.constant(0);
    }
    AdamWTensors tensors() const {
      const auto part = [&](const Operand& operand) {
        return operand.tensor().slice(0, first, operand.tensor().dim(0));
      };
      return {part(gradient), part(weight), part(m), part(v), copies ? part(copy) : Tensor(), decay};
    }
    Operand gradient, weight, m, v, copy;
    int64_t first;
    bool copies;
    double decay;
  };
  Device device(test::test_device_kind(), 2);
  std::vector<std::unique_ptr<Parameter>> once, apart;
  for (int64_t i = 0; i < 150; ++i)
    for (auto* parameters : {&once, &apart})
      parameters->push_back(std::make_unique<Parameter>(i, i % 50 == 3 ? 70001 : i * i % 257));
  AdamWStep adamw{.lr = 0.1, .weight_decay = 5, .step = 3, .gradient_scale = 0.5};
  std::vector<AdamWTensors> tensors;
  for (const auto& parameter : once) tensors.push_back(parameter->tensors());
  adamw_step_many(device, adamw, tensors);
  for (const auto& parameter : apart) {
    const AdamWTensors t = parameter->tensors();
    adamw.weight_decay = t.weight_decay;
    adamw_step(device, adamw, t.gradient, t.weight, t.m, t.v, t.compute_weight);
  }
  for (size_t i = 0; i < once.size(); ++i) {
    EXPECT_EQ(once[i]->weight.bytes(), apart[i]->weight.bytes()) << i;
    EXPECT_EQ(once[i]->m.bytes(), apart[i]->m.bytes()) << i;
    EXPECT_EQ(once[i]->v.bytes(), apart[i]->v.bytes()) << i;
    EXPECT_EQ(once[i]->copy.bytes(), apart[i]->copy.bytes()) << i;
  }
}

TEST(OptimizerStep, RefusesWhatDoesNotFit) {
  Device device(test::test_dry_run());
  Operand a(DType::f32, Shape{4}), b(DType::f32, Shape{5});
  EXPECT_THROW(adamw_step(device, {}, b, a, a, a, Tensor()), InternalError);
  EXPECT_THROW(adamw_step(device, {}, a, a, a, a, b), InternalError);
  Operand whole(DType::i32, Shape{4});
  EXPECT_THROW(adamw_step(device, {}, a, a, a, a, whole), InternalError);
  EXPECT_THROW(sgd_step(device, {}, a, a, whole), InternalError);
  EXPECT_THROW(adamw_step(device, {.step = 0}, a, a, a, a, Tensor()), InternalError);
}

}  // namespace
}  // namespace farspan
