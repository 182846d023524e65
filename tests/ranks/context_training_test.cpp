// SPDX-License-Identifier: Apache-2.0
// Whole training steps with every communication type and layout, layers that differ, and dropout, against one rank.
#include "config/names.h"
#include "tests/ranks/training_case.h"

namespace farspan::testing_case {
namespace {

constexpr CpCommType kCommTypes[] = {CpCommType::p2p, CpCommType::all_gather, CpCommType::a2a, CpCommType::a2a_p2p};

std::shared_ptr<const Dataset> packed_rows() {
  return std::make_shared<GivenRows>(std::vector<std::vector<int64_t>>{{1, 2, 5, 11, 21}, {17, 23}}, 257);
}

void compare(Config config, const std::vector<CpLayout>& layouts, std::initializer_list<int64_t> cp_sizes) {
  config.training.global_batch_size = 2;
  const Outcome one = train(with_cp(config, 1), 1, packed_rows(), 2);
  for (int64_t cp : cp_sizes)
    for (CpLayout layout : layouts)
      for (CpCommType type : kCommTypes) {
        Config cut = with_cp(config, cp, type);
        cut.parallel.cp_layout = layout;
        expect_same_training(train(cut, static_cast<int>(cp), packed_rows(), 2), one,
                             fmt::format("cp {} {} {}", cp, choice_name(type), choice_name(layout)));
      }
}

TEST(ContextTraining, EveryTypeAndLayoutIsExact) {
  compare(model_m(40), {CpLayout::zigzag, CpLayout::balanced}, {2, 4});
}

// A windowed layer and a whole one, each with a communication type of its own.
TEST(ContextTraining, LayersMayDiffer) {
  Config config = model_m(40);
  config.training.global_batch_size = 2;
  config.model.window_size = {7, 0};
  const Outcome one = train(with_cp(config, 1), 1, packed_rows(), 2);
  Config same = config;
  same.model.window_size = {7};
  EXPECT_NE(train(with_cp(same, 1), 1, packed_rows()).steps[0].totals.loss, one.steps[0].totals.loss);
  for (CpLayout layout : {CpLayout::zigzag, CpLayout::balanced}) {
    Config cut = with_cp(config, 4);
    cut.parallel.cp_comm_type = {CpCommType::a2a_p2p, CpCommType::all_gather};
    cut.parallel.cp_layout = layout;
    expect_same_training(train(cut, 4, packed_rows(), 2), one, fmt::format("windows, {}", choice_name(layout)));
  }
}

TEST(ContextTraining, DropoutDropsTheSameOnEveryLayout) {
  Config config = model_m(40);
  const auto loss = [&] { return *train(with_cp(config, 1), 1, packed_rows()).steps[0].totals.loss; };
  const double kept = loss();
  config.model.attention_dropout = 0.2;
  const double attention_dropped = loss();
  EXPECT_NE(attention_dropped, kept);
  config.model.hidden_dropout = 0.1;
  EXPECT_NE(loss(), attention_dropped);
  compare(config, {CpLayout::contiguous, CpLayout::balanced}, {4});
}

}  // namespace
}  // namespace farspan::testing_case
