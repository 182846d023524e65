// SPDX-License-Identifier: Apache-2.0
// Pipeline schedules, run by a simulator that moves messages as the links of parallel/pipeline/links.h do: in order,
// one under way for each direction, taken when the task that needs it starts. And the layers of each virtual stage.
#include <algorithm>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "base/error.h"
#include "base/math.h"
#include "parallel/pipeline/layer_split.h"
#include "parallel/pipeline/schedule.h"

namespace farspan {
namespace {

using Order = std::vector<PipelineTask>;

struct Times {
  int64_t forward = 1, backward = 1;
};

// What a message is for: the virtual stage and micro-batch of the task that takes it.
struct Message {
  int64_t virtual_stage = 0, micro_batch = 0;
  bool operator==(const Message&) const = default;
};

// One direction between two neighbouring stages.
struct Link {
  std::vector<std::pair<Message, int64_t>> sent;  // with the time
  std::vector<int64_t> taken;                     // times
  bool free() const { return sent.size() == taken.size(); }
};

struct Stage {
  Order order;
  size_t next = 0;
  int64_t time = 0;
  std::optional<Message> unsent;  // the result of the last task, until its link takes it
  PipelineAction direction = PipelineAction::forward;
  int64_t live = 0, most_live = 0;
  std::set<std::pair<int64_t, int64_t>> forwarded;  // (chunk, micro-batch)
};

class Simulation {
 public:
  Simulation(int chunks, const std::vector<Order>& orders, Times times) : chunks_(chunks), times_(times) {
    for (const Order& order : orders) {
      Stage stage;
      stage.order = order;
      stages_.push_back(stage);
    }
  }

  // Whether every stage came to the end of its order; `problem` says what went wrong.
  bool run() {
    bool progress = true;
    while (progress && problem.empty()) {
      progress = false;
      for (size_t s = 0; s < stages_.size(); ++s)
        while (problem.empty() && (send(s) || start_task(s))) progress = true;
    }
    if (!problem.empty()) return false;
    for (size_t s = 0; s < stages_.size(); ++s)
      if (stages_[s].next < stages_[s].order.size() || stages_[s].unsent) {
        problem = fmt::format("stage {} waits for ever at task {}", s, stages_[s].next);
        return false;
      }
    return true;
  }

  int64_t makespan() const {
    int64_t last = 0;
    for (const Stage& stage : stages_) last = std::max(last, stage.time);
    return last;
  }
  int64_t most_live(int stage) const { return stages_[static_cast<size_t>(stage)].most_live; }

  std::string problem;

 private:
  int64_t stage_count() const { return static_cast<int64_t>(stages_.size()); }
  int64_t last_virtual_stage() const { return stage_count() * chunks_ - 1; }

  // The link on which a message to `virtual_stage` travels, by the stage it arrives at.
  Link& link(PipelineAction direction, int64_t virtual_stage) {
    return links_[{direction, virtual_stage % stage_count()}];
  }

  bool send(size_t s) {
    Stage& stage = stages_[s];
    if (!stage.unsent) return false;
    Link& way = link(stage.direction, stage.unsent->virtual_stage);
    if (!way.free()) return false;
    if (!way.taken.empty()) stage.time = std::max(stage.time, way.taken.back());
    way.sent.emplace_back(*stage.unsent, stage.time);
    stage.unsent.reset();
    return true;
  }

  bool start_task(size_t s) {
    Stage& stage = stages_[s];
    if (stage.unsent || stage.next == stage.order.size()) return false;
    const PipelineTask& task = stage.order[stage.next];
    const bool forward = task.action == PipelineAction::forward;
    const int64_t v = task.chunk * stage_count() + static_cast<int64_t>(s);
    if (v != (forward ? 0 : last_virtual_stage())) {
      Link& way = link(task.action, v);
      if (way.free()) return false;
      const auto& [message, sent_at] = way.sent.back();
      if (!(message == Message{v, task.micro_batch})) {
        problem = fmt::format("stage {} wants virtual stage {} micro-batch {}, gets {} {}", s, v, task.micro_batch,
                              message.virtual_stage, message.micro_batch);
        return false;
      }
      stage.time = std::max(stage.time, sent_at);
      way.taken.push_back(stage.time);
    }
    finish_task(stage, task, v);
    return true;
  }

  void finish_task(Stage& stage, const PipelineTask& task, int64_t v) {
    const bool forward = task.action == PipelineAction::forward;
    const std::pair<int64_t, int64_t> pair{task.chunk, task.micro_batch};
    if (forward ? !stage.forwarded.insert(pair).second : stage.forwarded.count(pair) == 0)
      problem = fmt::format("chunk {} micro-batch {}: {}", task.chunk, task.micro_batch,
                            forward ? "forward twice" : "backward before forward");
    stage.live += forward ? 1 : -1;
    stage.most_live = std::max(stage.most_live, stage.live);
    stage.time += forward ? times_.forward : times_.backward;
    ++stage.next;
    if (v == (forward ? last_virtual_stage() : 0)) return;
    stage.unsent = Message{forward ? v + 1 : v - 1, task.micro_batch};
    stage.direction = task.action;
  }

  int chunks_;
  Times times_;
  std::vector<Stage> stages_;
  std::map<std::pair<PipelineAction, int64_t>, Link> links_;
};

std::vector<Order> orders_of(int stages, int64_t micro_batches, int chunks) {
  std::vector<Order> orders;
  for (int stage = 0; stage < stages; ++stage)
    orders.push_back(pipeline_schedule(stages, stage, micro_batches, chunks));
  return orders;
}

// Calls body(stages, chunks, micro_batches) for every case up to 8, 4 and 17.
template <typename Body>
void for_every_case(const Body& body) {
  for (int stages = 1; stages <= 8; ++stages)
    for (int chunks = 1; chunks <= 4; ++chunks)
      for (int64_t micro_batches = 1; micro_batches <= 17; ++micro_batches) {
        SCOPED_TRACE(fmt::format("{} stages, {} chunks, {} micro-batches", stages, chunks, micro_batches));
        body(stages, chunks, micro_batches);
        if (::testing::Test::HasFatalFailure()) return;
      }
}

TEST(PipelineSchedule, EveryTaskOnce) {
  for_every_case([](int stages, int chunks, int64_t micro_batches) {
    for (const Order& order : orders_of(stages, micro_batches, chunks)) {
      std::set<std::tuple<PipelineAction, int64_t, int>> seen;
      for (const PipelineTask& task : order) {
        ASSERT_TRUE(task.micro_batch >= 0 && task.micro_batch < micro_batches && task.chunk >= 0 &&
                    task.chunk < chunks);
        ASSERT_TRUE(seen.insert({task.action, task.micro_batch, task.chunk}).second);
      }
      ASSERT_EQ(seen.size(), static_cast<size_t>(2 * micro_batches * chunks));
    }
  });
}

TEST(PipelineSchedule, B012_AnyNumberOfMicroBatchesComesToAnEnd) {
  for_every_case([](int stages, int chunks, int64_t micro_batches) {
    Simulation simulation(chunks, orders_of(stages, micro_batches, chunks), {});
    ASSERT_TRUE(simulation.run()) << simulation.problem;
  });
}

TEST(PipelineSchedule, TimeIsWorkAndOneFillOfThePipeline) {
  for (const Times times : {Times{1, 1}, Times{1, 2}, Times{3, 2}})
    for_every_case([&](int stages, int chunks, int64_t micro_batches) {
      Simulation simulation(chunks, orders_of(stages, micro_batches, chunks), times);
      ASSERT_TRUE(simulation.run()) << simulation.problem;
      const int64_t both = times.forward + times.backward;
      const auto formula = [&](int64_t n) { return (chunks * n + stages - 1) * both; };
      if (chunks == 1 || micro_batches % stages == 0) {
        ASSERT_EQ(simulation.makespan(), formula(micro_batches));
        // The bubble: idle time over the time of the work alone.
        const double work = static_cast<double>(chunks * micro_batches * both);
        ASSERT_NEAR((static_cast<double>(simulation.makespan()) - work) / work,
                    static_cast<double>(stages - 1) / static_cast<double>(chunks * micro_batches), 1e-12);
      } else {
        ASSERT_LE(simulation.makespan(), formula(round_up(micro_batches, stages)));
      }
    });
}

TEST(PipelineSchedule, MicroBatchesInFlight) {
  for_every_case([](int stages, int chunks, int64_t micro_batches) {
    Simulation simulation(chunks, orders_of(stages, micro_batches, chunks), {});
    ASSERT_TRUE(simulation.run()) << simulation.problem;
    for (int stage = 0; stage < stages; ++stage) {
      const int64_t after = stages - 1 - stage;
      const int64_t promised = chunks == 1 ? after + 1 : 2 * after + (chunks - 1) * stages + 1;
      const int64_t most = std::min(micro_batches * chunks, promised);
      ASSERT_LE(simulation.most_live(stage), most) << "stage " << stage;
      if (chunks == 1) {
        ASSERT_EQ(simulation.most_live(stage), most) << "stage " << stage;
      }
    }
  });
}

TEST(PipelineSchedule, OneForwardOneBackward) {
  using enum PipelineAction;
  EXPECT_EQ(
      pipeline_schedule(2, 0, 3, 1),
      (Order{{forward, 0, 0}, {forward, 1, 0}, {backward, 0, 0}, {forward, 2, 0}, {backward, 1, 0}, {backward, 2, 0}}));
  EXPECT_EQ(pipeline_schedule(2, 1, 2, 1),
            (Order{{forward, 0, 0}, {backward, 0, 0}, {forward, 1, 0}, {backward, 1, 0}}));
  // One stage with two chunks: each micro-batch goes through before the next one starts.
  EXPECT_EQ(pipeline_schedule(1, 0, 1, 2),
            (Order{{forward, 0, 0}, {forward, 0, 1}, {backward, 0, 1}, {backward, 0, 0}}));
  EXPECT_EQ(pipeline_schedule(4, 2, 0, 2), Order{});
}

TEST(PipelineSchedule, RefusesSizesThatMakeNoSense) {
  EXPECT_THROW(pipeline_schedule(0, 0, 1, 1), InternalError);
  EXPECT_THROW(pipeline_schedule(2, 2, 1, 1), InternalError);
  EXPECT_THROW(pipeline_schedule(2, -1, 1, 1), InternalError);
  EXPECT_THROW(pipeline_schedule(2, 0, -1, 1), InternalError);
  EXPECT_THROW(pipeline_schedule(2, 0, 1, 0), InternalError);
}

// The simulator finds what it is there to find.
TEST(PipelineSchedule, TheSimulatorSeesBadOrders) {
  using enum PipelineAction;
  const Order good = pipeline_schedule(2, 1, 2, 1);
  Simulation stuck(1,
                   {{{forward, 0, 0}, {backward, 0, 0}, {forward, 1, 0}, {backward, 1, 0}},
                    {{forward, 0, 0}, {forward, 1, 0}, {backward, 0, 0}, {backward, 1, 0}}},
                   {});
  EXPECT_FALSE(stuck.run());
  EXPECT_NE(stuck.problem.find("waits for ever"), std::string::npos) << stuck.problem;
  Simulation crossed(1, {{{forward, 1, 0}, {forward, 0, 0}, {backward, 0, 0}, {backward, 1, 0}}, good}, {});
  EXPECT_FALSE(crossed.run());
  EXPECT_NE(crossed.problem.find("gets 1 1"), std::string::npos) << crossed.problem;
  Simulation early(1, {{{backward, 0, 0}, {forward, 0, 0}}}, {});
  EXPECT_FALSE(early.run());
  EXPECT_NE(early.problem.find("backward before forward"), std::string::npos) << early.problem;
}

std::vector<int64_t> lengths(const LayerSplit& split) {
  std::vector<int64_t> result;
  int64_t begin = 0;
  for (const Span& span : split_layers(split)) {
    EXPECT_EQ(span.begin, begin) << "virtual stages follow each other";
    begin = span.end;
    result.push_back(span.length());
  }
  EXPECT_EQ(begin, split.layers);
  return result;
}

using Lengths = std::vector<int64_t>;

TEST(LayerSplit, EarlierStagesHoldWhatDoesNotDivide) {
  EXPECT_EQ(lengths({.layers = 8, .stages = 4}), (Lengths{2, 2, 2, 2}));
  EXPECT_EQ(lengths({.layers = 7, .stages = 4}), (Lengths{2, 2, 2, 1}));
  EXPECT_EQ(lengths({.layers = 5, .stages = 1}), (Lengths{5}));
  EXPECT_EQ(lengths({.layers = 8, .stages = 2, .chunks = 2}), (Lengths{2, 2, 2, 2}));
  EXPECT_EQ(lengths({.layers = 7, .stages = 2, .chunks = 2}), (Lengths{2, 2, 2, 1}));
}

TEST(LayerSplit, FirstAndLastStageByHand) {
  EXPECT_EQ(lengths({.layers = 10, .stages = 4, .first_layers = 1}), (Lengths{1, 3, 3, 3}));
  EXPECT_EQ(lengths({.layers = 10, .stages = 4, .last_layers = 2}), (Lengths{3, 3, 2, 2}));
  EXPECT_EQ(lengths({.layers = 9, .stages = 4, .first_layers = 1, .last_layers = 2}), (Lengths{1, 3, 3, 2}));
  EXPECT_EQ(lengths({.layers = 3, .stages = 2, .first_layers = 1, .last_layers = 2}), (Lengths{1, 2}));
  EXPECT_EQ(lengths({.layers = 12, .stages = 3, .chunks = 2, .first_layers = 2, .last_layers = 4}),
            (Lengths{1, 3, 2, 1, 3, 2}));
}

std::string config_error_of(const LayerSplit& split) {
  try {
    split_layers(split);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "nothing thrown";
}

TEST(LayerSplit, AVirtualStageWithoutALayerIsAnError) {
  const auto expect = [](const LayerSplit& split, const std::string& text) {
    const std::string message = config_error_of(split);
    EXPECT_NE(message.find(text), std::string::npos) << message;
  };
  expect({.layers = 3, .stages = 4}, "at least 4 layers");
  expect({.layers = 3, .stages = 4}, "at most 3 stages");
  expect({.layers = 7, .stages = 2, .chunks = 4}, "at least 8 layers");
  expect({.layers = 7, .stages = 2, .chunks = 4}, "at most 3 chunks");
  expect({.layers = 3, .stages = 2, .chunks = 4}, "at most 1 chunk");
  expect({.layers = 10, .stages = 2, .first_layers = 3, .last_layers = 6}, "add up to 9 of 10");
  expect({.layers = 10, .stages = 1, .first_layers = 3}, "3 of 10");
  expect({.layers = 10, .stages = 4, .first_layers = 5, .last_layers = 4}, "1 layer for the 2 stages between");
  expect({.layers = 10, .stages = 4, .first_layers = 9, .last_layers = 4}, "add up to 13 of 10");
  expect({.layers = 20, .stages = 4, .chunks = 3, .first_layers = 2}, "decoder_first_pipeline_num_layers 2");
}

}  // namespace
}  // namespace farspan
