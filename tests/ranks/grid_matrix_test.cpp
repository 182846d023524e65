// SPDX-License-Identifier: Apache-2.0
// Invariant 1 (design: exact) as a matrix: grid sizes, communication types, layouts, ZeRO stages, masks, recomputation,
// dropout, tied and untied heads, grouped queries, optimizers. All combinations would be millions; the cases are chosen
// so that every value of every option meets every value of every other one that it can be combined with (pairwise
// covering, built greedily from a fixed stream of draws).
#include <functional>
#include <map>
#include <set>

#include "config/head_split.h"
#include "config/validate.h"
#include "tests/ranks/training_case.h"

namespace farspan::testing_case {
namespace {

// A choice of one value, by number, for each option.
using Choice = std::vector<size_t>;

struct Option {
  std::string name;
  std::vector<std::string> values;
  std::function<void(Config&, size_t)> apply;
};

struct Sizes {
  int64_t tp, cp, pp, dp;
};
constexpr Sizes kSizes[] = {{1, 2, 1, 1}, {1, 3, 1, 1}, {1, 4, 1, 1}, {1, 8, 1, 1}, {2, 1, 1, 1}, {4, 1, 1, 1},
                            {1, 1, 2, 1}, {1, 1, 4, 1}, {1, 1, 1, 2}, {1, 1, 1, 4}, {2, 2, 1, 1}, {2, 1, 2, 1},
                            {2, 1, 1, 2}, {1, 2, 2, 1}, {1, 2, 1, 2}, {1, 1, 2, 2}, {2, 2, 2, 1}, {2, 2, 1, 2},
                            {2, 1, 2, 2}, {1, 2, 2, 2}, {4, 2, 1, 1}, {1, 4, 2, 1}, {1, 4, 1, 2}, {2, 4, 1, 1}};
constexpr int64_t kLength = 24;
constexpr size_t kEveryCase = kThreadSanitizer ? 6 : 1;
constexpr int64_t kSteps = kThreadSanitizer ? 2 : 5;

// One value of an option of numbers.
template <typename Value>
Option option(std::string name, std::vector<Value> values, std::function<void(Config&, Value)> set) {
  std::vector<std::string> texts;
  for (const Value& value : values) texts.push_back(fmt::format("{}", value));
  return {std::move(name), std::move(texts), [=](Config& config, size_t i) { set(config, values[i]); }};
}

std::vector<Option> options() {
  std::vector<Option> all;
  Option sizes = {"sizes", {}, [](Config& config, size_t i) {
                    config.parallel.tensor_model_parallel_size = kSizes[i].tp;
                    config.parallel.context_parallel_size = kSizes[i].cp;
                    config.parallel.pipeline_model_parallel_size = kSizes[i].pp;
                  }};
  for (const Sizes& s : kSizes) sizes.values.push_back(fmt::format("tp{} cp{} pp{} dp{}", s.tp, s.cp, s.pp, s.dp));
  all.push_back(sizes);
  all.push_back({"comm", {"p2p", "all_gather", "a2a", "a2a+p2p"}, [](Config& config, size_t i) {
                   config.parallel.cp_comm_type = {static_cast<CpCommType>(i)};
                 }});
  all.push_back({"layout", {"zigzag", "contiguous", "balanced"}, [](Config& config, size_t i) {
                   config.parallel.cp_layout = static_cast<CpLayout>(i);
                 }});
  all.push_back({"mask", {"causal", "window", "documents", "padding"}, [](Config& config, size_t i) {
                   if (i == 1) config.model.window_size = {5, 0, 9, 0};
                 }});
  all.push_back(option<int>("zero", {0, 1, 2, 3}, [](Config& c, int v) { c.parallel.zero_stage = v; }));
  all.push_back(option<int>("recompute", {0, 1, 2},
                            [](Config& c, int v) { c.memory.recompute_granularity = static_cast<Recompute>(v); }));
  all.push_back(option<int>("kv heads", {4, 2, 1}, [](Config& c, int v) { c.model.num_query_groups = v; }));
  all.push_back(
      option<int>("tied", {0, 1}, [](Config& c, int v) { c.model.untie_embeddings_and_output_weights = v == 0; }));
  all.push_back(option<int>("sp", {0, 1}, [](Config& c, int v) { c.parallel.sequence_parallel = v == 1; }));
  all.push_back(option<int>("dropout", {0, 1}, [](Config& c, int v) {
    c.model.attention_dropout = v * 0.2;
    c.model.hidden_dropout = v * 0.1;
  }));
  all.push_back(
      option<int>("virtual", {0, 1}, [](Config& c, int v) { c.parallel.num_layers_per_virtual_pipeline_stage = v; }));
  all.push_back(option<int>("overlap", {0, 1}, [](Config& c, int v) {
    c.parallel.overlap_grad_reduce = c.parallel.overlap_param_gather = v == 1;
  }));
  all.push_back(option<int>("adamw", {0, 1}, [](Config& c, int v) {
    if (v == 0) return;
    // Where a gradient is rounding alone, AdamW would turn its sign into a step of lr; epsilon is above that rounding.
    c.optimizer.optimizer = OptimizerKind::adamw;
    c.optimizer.lr = 2e-3;
    c.optimizer.adam_eps = 1e-4;
    c.optimizer.weight_decay = 0.1;
  }));
  all.push_back(option<int>("tiles", {1000, 5},
                            [](Config& c, int v) { c.memory.mlp_tile_tokens = c.memory.loss_tile_tokens = v; }));
  return all;
}

Config base_config() {
  Config config = model_m(kLength);
  config.model.num_layers = 4;
  config.model.qk_layernorm = true;
  config.model.add_qkv_bias = false;
  config.model.vocab_size = 61;
  config.training.global_batch_size = 4;
  config.optimizer.clip_grad = 0.5;
  return config;
}

std::shared_ptr<const Dataset> dataset_of(size_t mask) {
  std::vector<std::vector<int64_t>> rows(8, {kLength});
  if (mask == 2) rows = {{1, 2, 5, 11, 5}, {24}, {7, 17}, {12, 12}, {3, 21}, {8, 8, 8}, {9, 15}, {23, 1}};
  if (mask == 3) rows = {{3, 2}, {19}, {24}, {1}, {10, 4}, {6}, {22}, {2, 2}};
  return std::make_shared<GivenRows>(rows, 61);
}

Config config_of(const std::vector<Option>& all, const Choice& choice) {
  Config config = base_config();
  for (size_t i = 0; i < all.size(); ++i) all[i].apply(config, choice[i]);
  return config;
}

int ranks_of(const Choice& choice) {
  const Sizes& sizes = kSizes[choice[0]];
  return static_cast<int>(sizes.tp * sizes.cp * sizes.pp * sizes.dp);
}

// Whether the validator lets the choice pass.
bool legal(const std::vector<Option>& all, const Choice& choice) {
  try {
    Config config = config_of(all, choice);
    resolve(config, ranks_of(choice));
    return true;
  } catch (const ConfigError&) {
    return false;
  }
}

// Pairs of values of two options, as numbers below kPairs: values are numbered over all options.
constexpr size_t kValues = 64;
constexpr size_t kPairs = kValues * kValues;

std::vector<size_t> pairs_of(const std::vector<Option>& all, const Choice& choice) {
  std::vector<size_t> numbers;
  size_t first = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    numbers.push_back(first + choice[i]);
    first += all[i].values.size();
  }
  FARSPAN_CHECK(first <= kValues, "{} values of options, room for {}", first, kValues);
  std::vector<size_t> pairs;
  for (size_t i = 0; i < numbers.size(); ++i)
    for (size_t j = i + 1; j < numbers.size(); ++j) pairs.push_back(numbers[i] * kValues + numbers[j]);
  return pairs;
}

Choice draw(const std::vector<Option>& all, const Philox& random, uint64_t& at) {
  Choice choice;
  for (const Option& option : all)
    choice.push_back(static_cast<size_t>(random.uniform(at++) * static_cast<double>(option.values.size())));
  return choice;
}

// Cases that cover every pair of values that any legal case seen contains.
std::vector<Choice> covering_cases(const std::vector<Option>& all) {
  constexpr int kCandidates = 4000;
  const Philox random(3, "grid matrix");
  uint64_t at = 0;
  std::vector<Choice> candidates;
  std::vector<std::vector<size_t>> pairs;  // of each candidate
  std::vector<bool> open(kPairs, false);
  for (int i = 0; i < kCandidates; ++i) {
    Choice choice = draw(all, random, at);
    if (!legal(all, choice)) continue;
    pairs.push_back(pairs_of(all, choice));
    for (size_t pair : pairs.back()) open[pair] = true;
    candidates.push_back(std::move(choice));
  }
  std::vector<Choice> cases;
  while (true) {
    size_t best = 0;
    std::ptrdiff_t most = 0;
    for (size_t candidate = 0; candidate < candidates.size(); ++candidate) {
      const auto covers =
          std::count_if(pairs[candidate].begin(), pairs[candidate].end(), [&](size_t pair) { return open[pair]; });
      if (covers > most) {
        most = covers;
        best = candidate;
      }
    }
    if (most == 0) return cases;
    for (size_t pair : pairs[best]) open[pair] = false;
    cases.push_back(candidates[best]);
  }
}

std::string text_of(const std::vector<Option>& all, const Choice& choice) {
  std::string text;
  for (size_t i = 0; i < all.size(); ++i) text += fmt::format("{} {}; ", all[i].name, all[i].values[choice[i]]);
  return text;
}

// The settings alone on one rank.
Config alone(Config config) {
  config.parallel = {};
  return config;
}

TEST(GridMatrix, EveryPairOfOptionsIsExact) {
  const std::vector<Option> all = options();
  const std::vector<Choice> cases = covering_cases(all);
  std::map<std::string, Outcome> references;
  for (size_t i = 0; i < cases.size(); i += kEveryCase) {
    const Choice& choice = cases[i];
    const Config config = config_of(all, choice);
    // What one rank computes does not depend on how others are laid out.
    Choice settings = choice;
    const std::set<std::string> of_layout = {"sizes", "comm", "layout", "zero", "sp", "virtual", "overlap"};
    for (size_t option = 0; option < all.size(); ++option)
      if (of_layout.contains(all[option].name)) settings[option] = 0;
    const auto dataset = dataset_of(choice[3]);
    const std::string key = text_of(all, settings);
    if (!references.contains(key)) references.emplace(key, train(alone(config), 1, dataset, kSteps));
    expect_same_training(train(config, ranks_of(choice), dataset, kSteps), references.at(key), text_of(all, choice));
    if (HasFailure()) break;
  }
  fmt::print("every {} of {} cases, {} references\n", kEveryCase, cases.size(), references.size());
}

}  // namespace
}  // namespace farspan::testing_case
