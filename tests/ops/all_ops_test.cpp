// SPDX-License-Identifier: Apache-2.0
// What holds for every op: the dry device touches no memory, any number of threads gives the same bits, and a rank that
// was dealt no tokens, no heads or no part of the vocabulary calls it like the others.
#include <map>

#include "ops/bias.h"
#include "ops/cross_entropy.h"
#include "ops/dropout.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/gemm.h"
#include "ops/norms.h"
#include "ops/optimizer_step.h"
#include "ops/rms_norm.h"
#include "ops/rms_norm_rope.h"
#include "ops/rope.h"
#include "ops/swiglu.h"
#include "tests/ops/operand.h"

namespace farspan {
namespace {

using test::Operand;

struct Sizes {
  int64_t tokens, hidden, heads, head_dim, vocabulary, embeddings;
};
// Large enough for every op to be split over threads, with odd sizes.
constexpr Sizes kSplit{67, 770, 9, 86, 771, 97};
// 512 Gi elements of hidden state: no machine has it, the dry device does not care.
constexpr Sizes kHuge{int64_t{1} << 26, 8192, 32, 128, 131072, 131072};

struct OpCounter : OpObserver {
  void on_op(const OpCost& cost, OpTime) override {
    ++count;
    EXPECT_FALSE(cost.op.empty());
    EXPECT_GT(cost.bytes, 0) << cost.op;
    EXPECT_GE(cost.flops, 0) << cost.op;
  }
  int count = 0;
};

// Runs every op once on operands that `operand(name, dtype, shape)` supplies; same name, same operand.
template <typename Supply>
void run_all(Device& device, DType dtype, const Sizes& s, const Supply& operand) {
  const Shape hidden{s.tokens, s.hidden}, rows{s.tokens}, width{s.hidden};
  const Tensor x = operand("x", dtype, hidden), d_y = operand("d_y", dtype, hidden), y = operand("y", dtype, hidden);
  const Tensor weight = operand("weight", dtype, width), rstd = operand("rstd", DType::f32, rows);
  const Tensor d_weight = operand("d_weight", DType::f32, width), d_x = operand("d_x", dtype, hidden);
  rms_norm_forward(device, x, weight, 1e-5, y, rstd);
  rms_norm_backward(device, d_y, x, weight, rstd, d_x, Accumulate::yes, d_weight);

  const Tensor matrix = operand("matrix", dtype, Shape{s.hidden, s.hidden});
  const Tensor d_matrix = operand("d_matrix", DType::f32, Shape{s.hidden, s.hidden});
  const Tensor projected = operand("projected", dtype, hidden);
  linear_forward(device, x, matrix, projected);
  linear_backward_input(device, d_y, matrix, d_x, Accumulate::no);
  linear_backward_weight(device, d_y, x, d_matrix, Accumulate::yes);
  gemm(device, x, Transpose::no, matrix, Transpose::no, projected, Accumulate::yes);
  bias_add(device, weight, projected);
  bias_backward(device, d_y, operand("d_bias", DType::f32, width));

  const Shape half{s.tokens, s.hidden / 2};
  const Tensor activated = operand("activated", dtype, half), d_activated = operand("d_activated", dtype, half);
  swiglu_forward(device, x, activated);
  swiglu_backward(device, x, d_activated, operand("d_gate_up", dtype, hidden));
  swiglu_backward_and_output(device, x, d_activated, operand("d_gate_up_again", dtype, hidden), activated);

  const Tensor tokens = operand("tokens", DType::i32, rows), targets = operand("targets", DType::i32, rows);
  embedding_forward(device, tokens, operand("embeddings", dtype, Shape{s.embeddings, s.hidden}), y);
  embedding_backward(device, tokens, d_y, operand("d_embeddings", DType::f32, Shape{s.embeddings, s.hidden}));

  const Shape vocabulary{s.tokens, s.vocabulary};
  const Tensor logits = operand("logits", DType::f32, vocabulary), loss = operand("loss", DType::f32, rows);
  cross_entropy(device, logits, targets, 0.5, loss, operand("d_logits", dtype, vocabulary));
  token_loss_sum(device, loss, operand("loss_sum", DType::f64, Shape{1}));

  const VocabularyPart part{.first_id = 1, .vocabulary = s.vocabulary + 1};
  const Tensor statistics = operand("statistics", DType::f32, Shape{1, 2, s.tokens});
  const Tensor lse = operand("lse", DType::f32, rows);
  vocabulary_statistics(device, logits, targets, part, statistics.reshape(Shape{2, s.tokens}));
  combine_statistics(device, statistics, targets, lse, loss);
  vocabulary_gradient(device, logits, targets, part, lse, 0.5, operand("d_part_logits", dtype, vocabulary));
  const VocabularyPart rows_part{.first_id = 3, .vocabulary = s.embeddings + 3};
  embedding_forward(device, tokens, operand("embeddings", dtype, Shape{s.embeddings, s.hidden}), rows_part,
                    operand("part_of_y", DType::f32, hidden));
  embedding_backward(device, tokens, d_y, rows_part,
                     operand("d_embeddings", DType::f32, Shape{s.embeddings, s.hidden}));

  const Tensor positions = operand("positions", DType::i64, rows);
  const Tensor table = operand("table", DType::f32, Shape{s.tokens, 2, s.head_dim / 2});
  const Tensor query = operand("query", dtype, Shape{s.tokens, s.heads, s.head_dim});
  rope_table(device, positions, rope_inverse_frequencies({.head_dim = s.head_dim}), 1.0, table);
  rope_apply(device, table, RopeStyle::half_split, RopeDirection::forward, query);
  rope_apply(device, table, RopeStyle::interleaved, RopeDirection::backward, query);
  const Tensor head_weight = operand("head_weight", dtype, Shape{s.head_dim}),
               key = operand("key", dtype, query.shape());
  const Tensor head_rstd = operand("head_rstd", DType::f32, Shape{s.tokens, s.heads});
  rms_norm_rope_forward(device, query, head_weight, 1e-6, table, RopeStyle::half_split, key, head_rstd);
  rms_norm_rope_backward(device, key, query, head_weight, head_rstd, table, RopeStyle::half_split,
                         operand("d_query", dtype, query.shape()),
                         operand("d_head_weight", DType::f32, Shape{s.head_dim}));

  const Dropout dropout{.probability = 0.3, .key = 5};
  dropout_add(device, dropout, positions, x, d_y, operand("dropped", dtype, hidden));
  dropout_backward(device, dropout, positions, d_y, operand("d_dropped", dtype, hidden));

  const Tensor wide = operand("wide", DType::f32, hidden);
  add(device, x, d_y, wide);
  cast(device, wide, operand("narrow", DType::bf16, hidden));
  scale(device, wide, 3.0);
  const Tensor squares = operand("squares", DType::f64, Shape{1});
  sum_of_squares(device, wide, squares);
  const Tensor both[] = {wide, d_weight};
  sum_of_squares(device, both, squares);
  fill(device, operand("filled", DType::f32, hidden), 2.5);

  const Tensor master = operand("master", DType::f32, hidden), copy = operand("copy", DType::bf16, hidden);
  adamw_step(device, {.lr = 0.1, .weight_decay = 0.1}, wide, master, operand("m", DType::f32, hidden),
             operand("v", DType::f32, hidden), copy);
  sgd_step(device, {.lr = 0.1, .weight_decay = 0.1}, wide, master, copy);
  const AdamWTensors parameter = {wide, master, operand("m", DType::f32, hidden), operand("v", DType::f32, hidden),
                                  copy, 0.1};
  const AdamWTensors other = {wide,
                              operand("other_master", DType::f32, hidden),
                              operand("other_m", DType::f32, hidden),
                              operand("other_v", DType::f32, hidden),
                              operand("other_copy", DType::bf16, hidden),
                              0.0};
  const AdamWTensors parameters[] = {parameter, other};
  adamw_step_many(device, {.lr = 0.1}, parameters);
}

class AllOpsTest : public testing::TestWithParam<DType> {};

TEST_P(AllOpsTest, DryDeviceTouchesNothing) {
  Device device(test::test_dry_run());
  OpCounter counter;
  device.observe(&counter);
  uintptr_t wild = 0x100000000000000;  // not canonical: any access would end the program
  run_all(device, GetParam(), kHuge, [&](const char*, DType dtype, const Shape& shape) {
    return Tensor(reinterpret_cast<void*>(wild += 0x1000000), dtype, shape);
  });
  EXPECT_EQ(counter.count, test::testing_cuda() ? 36 : 39);  // some are several on a CPU
}

// Nothing to do is not an error, and what was there stays.
TEST_P(AllOpsTest, NoTokensNoHeadsOrNoVocabularyIsNoWork) {
  for (const Sizes& sizes : {Sizes{0, 48, 3, 16, 31, 23}, Sizes{5, 48, 0, 16, 31, 23}, Sizes{5, 48, 3, 16, 0, 23}}) {
    Device device(test::test_device_kind(), 2);
    std::map<std::string, std::unique_ptr<Operand>> operands;
    run_all(device, GetParam(), sizes, [&](const char* name, DType dtype, const Shape& shape) {
      auto& operand = operands[name];
      if (!operand) {
        operand = std::make_unique<Operand>(dtype, shape);
        const std::string_view what = name;
        // With no vocabulary there are no targets either.
        operand->constant(what == "targets" && sizes.vocabulary == 0 ? -1 : what == "tokens" ? 3 : 1);
      }
      return operand->tensor();
    });
    if (sizes.tokens > 0) continue;
    EXPECT_EQ(*operands.at("loss_sum")->tensor().data<double>(), 1);
    for (const char* gradient : {"d_weight", "d_matrix", "d_bias", "d_embeddings"})
      for (const double value : operands.at(gradient)->values()) ASSERT_EQ(value, 1) << gradient;
  }
}

TEST_P(AllOpsTest, AnyNumberOfThreadsGivesTheSameBits) {
  std::map<std::string, std::vector<uint8_t>> bits_of_one;
  for (const int threads : {1, 2, 3}) {
    Device device(test::test_device_kind(), threads);
    std::map<std::string, std::unique_ptr<Operand>> operands;
    run_all(device, GetParam(), kSplit, [&](const char* name, DType dtype, const Shape& shape) {
      auto& operand = operands[name];
      if (!operand) {
        operand = std::make_unique<Operand>(dtype, shape);
        const std::string_view what = name;
        if (what == "tokens" || what == "targets" || what == "positions")
          operand->set([&](int64_t i) {
            return static_cast<double>(i * i % kSplit.embeddings) - (what == "targets" && i % 5 == 0);
          });
        else if (what == "v")
          operand->constant(0.5);
        else
          operand->random(name_hash(name));
      }
      return operand->tensor();
    });
    // The library that computes matrix products promises no order across thread counts.
    for (const char* product : {"projected", "d_matrix", "d_x"}) operands.erase(product);
    for (const auto& [name, operand] : operands) {
      if (threads == 1)
        bits_of_one[name] = operand->bytes();
      else
        EXPECT_EQ(operand->bytes(), bits_of_one[name]) << name << " with " << threads << " threads";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, AllOpsTest, testing::Values(DType::f32, DType::bf16), test::type_name);

}  // namespace
}  // namespace farspan
