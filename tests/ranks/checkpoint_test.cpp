// SPDX-License-Identifier: Apache-2.0
// Any layout loads what any layout saved: weights, moments and the place in the run, bit for bit.
#include "train/checkpoint.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>

#include "io/safetensors.h"
#include "tests/ranks/training_case.h"
#include "tests/scratch_folder.h"

namespace farspan::testing_case {
namespace {

using test::ScratchFolder;

Config training_config() {
  Config config = model_m(24);
  config.model.num_layers = 4;
  config.model.num_query_groups = 1;
  config.optimizer.optimizer = OptimizerKind::adamw;
  config.optimizer.lr = 2e-3;
  config.optimizer.adam_eps = 1e-4;
  config.training.global_batch_size = 6;
  return config;
}

std::shared_ptr<const Dataset> rows() {
  std::vector<std::vector<int64_t>> lengths;
  for (int64_t i = 0; i < 24; ++i) lengths.push_back({1 + i % 5, 23 - i % 5});
  return std::make_shared<GivenRows>(lengths, 257);
}

struct Grid4 {
  int64_t tp = 1;
  int64_t pp = 1;
  int64_t cp = 1;
  int64_t dp = 1;
  int64_t zero = 0;
  std::string text() const { return fmt::format("tp {} pp {} cp {} dp {} zero {}", tp, pp, cp, dp, zero); }
};

Job job_of(Config config, const Grid4& grid) {
  config.parallel.tensor_model_parallel_size = grid.tp;
  config.parallel.sequence_parallel = grid.tp > 1;
  config.parallel.pipeline_model_parallel_size = grid.pp;
  config.parallel.context_parallel_size = grid.cp;
  config.parallel.zero_stage = grid.zero;
  return training_job(config, static_cast<int>(grid.tp * grid.pp * grid.cp * grid.dp), rows());
}

// Everything a run can go on from.
struct State {
  std::vector<float> weights;
  std::vector<float> first_moment;
  std::vector<float> second_moment;
  std::vector<double> losses;
  bool operator==(const State&) const = default;
};

State state_of(RankTrainer& trainer) {
  return {trainer.whole_values(StateKind::weights),
          trainer.whole_values(StateKind::first_moment),
          trainer.whole_values(StateKind::second_moment),
          {}};
}

// Steps first..last; loads before them and saves behind them where a folder is given.
State run(const Config& config, const Grid4& grid, int64_t first, int64_t last, const std::string& load,
          const std::string& save) {
  const Job job = job_of(config, grid);
  State result;
  run_job(job, [&](RankTrainer& trainer, World&) {
    if (load.empty())
      trainer.initialise_weights();
    else
      load_checkpoint(find_checkpoint(load), trainer, CheckpointParts::everything);
    std::vector<double> losses;
    for (int64_t step = first; step <= last; ++step) losses.push_back(*trainer.train_step(step, false).totals.loss);
    if (!save.empty())
      save_checkpoint(save, trainer, {.step = last, .updates = trainer.updates(), .data_identity = "", .settings = {}},
                      0);
    State state = state_of(trainer);
    EXPECT_TRUE(trainer.ranks_hold(StateKind::weights, state.weights));
    if (trainer.context().rank != 0) return;
    result = std::move(state);
    result.losses = std::move(losses);
  });
  return result;
}

const std::vector<Grid4>& grids() {
  static const std::vector<Grid4> all = {{},
                                         {.tp = 2},
                                         {.pp = 2},
                                         {.dp = 2, .zero = 1},
                                         {.dp = 3, .zero = 3},
                                         {.tp = 2, .pp = 2, .zero = 2},
                                         {.tp = 4, .cp = 2, .zero = 3}};
  return all;
}

TEST(Checkpoint, B098_AnyLayoutLoadsWhatAnyLayoutSavedBitForBit) {
  Config config = training_config();
  for (Precision precision : {Precision::fp32, Precision::bf16}) {
    if (kThreadSanitizer && precision == Precision::fp32) continue;
    config.training.precision = precision;
    for (const Grid4& from : grids()) {
      const ScratchFolder folder;
      const State saved = run(config, from, 1, 2, "", folder.path());
      for (const Grid4& to : grids()) {
        const State loaded = run(config, to, 3, 2, folder.path(), "");
        const std::string what = from.text() + " to " + to.text();
        EXPECT_TRUE(loaded.weights == saved.weights) << what;
        EXPECT_TRUE(loaded.first_moment == saved.first_moment) << what;
        EXPECT_TRUE(loaded.second_moment == saved.second_moment) << what;
      }
    }
  }
}

TEST(Checkpoint, B094_GoesOnWithAnotherNumberOfDataParallelRanks) {
  const Config config = training_config();
  for (int64_t zero : {0, 1, 3}) {
    const Grid4 two = {.dp = 2, .zero = zero};
    const Grid4 three = {.dp = 3, .zero = zero};
    for (const auto& [from, to] : {std::pair{two, three}, std::pair{three, two}}) {
      const ScratchFolder folder;
      const State unbroken = run(config, from, 1, 4, "", "");
      run(config, from, 1, 3, "", folder.path());
      EXPECT_NEAR(run(config, to, 4, 4, folder.path(), "").losses[0], unbroken.losses[3], 1e-6)
          << from.text() << " to " << to.text();
    }
  }
}

// The embedding alone is longer than a rank's share of everything else.
TEST(Checkpoint, B095_AShardInsideAHugeParameter) {
  Config config = training_config();
  config.model.vocab_size = 4096;
  config.model.hidden_size = 16;
  config.model.kv_channels = 4;
  config.training.global_batch_size = 4;
  const Grid4 grid = {.dp = 4, .zero = 1};
  const ScratchFolder folder;
  const auto go = [&](int64_t first, int64_t last, const std::string& load, const std::string& save) {
    return run(config, grid, first, last, load, save);
  };
  const State unbroken = go(1, 4, "", "");
  go(1, 2, "", folder.path());
  const State resumed = go(3, 4, folder.path(), "");
  EXPECT_TRUE(resumed.weights == unbroken.weights);
  EXPECT_TRUE(resumed.second_moment == unbroken.second_moment);
}

// The copies on all ranks are the same before saving, after loading, and a step later; with dropout, whose draws hang
// on nothing that a rank would have to save.
TEST(Checkpoint, B080_B096_ResumesAsIfUnbroken) {
  Config config = training_config();
  config.model.attention_dropout = 0.1;
  config.model.hidden_dropout = 0.1;
  for (const Grid4& grid : {Grid4{.tp = 2, .dp = 2}, Grid4{.tp = 2, .pp = 2}, Grid4{.cp = 2, .dp = 2, .zero = 3}}) {
    const ScratchFolder folder;
    const State unbroken = run(config, grid, 1, 6, "", "");
    run(config, grid, 1, 3, "", folder.path());
    const State resumed = run(config, grid, 4, 6, folder.path(), "");
    EXPECT_TRUE(resumed.weights == unbroken.weights) << grid.text();
    EXPECT_TRUE(resumed.second_moment == unbroken.second_moment) << grid.text();
  }
}

// Which rows a step's ranks read. Ranks are threads, each of which knows its own step.
class ReadRows : public GivenRows {
 public:
  using GivenRows::GivenRows;
  void read(const Row& row, Span span, std::span<int32_t> tokens, std::span<int32_t> labels) const override {
    GivenRows::read(row, span, tokens, labels);
    const std::lock_guard lock(mutex_);
    seen_[step].insert(row.id);
  }
  std::map<int64_t, std::set<int64_t>> seen() const { return seen_; }
  static thread_local int64_t step;

 private:
  mutable std::mutex mutex_;
  mutable std::map<int64_t, std::set<int64_t>> seen_;
};
thread_local int64_t ReadRows::step = 0;

TEST(Checkpoint, B091_RowsAfterAResumeAreThoseOfTheUnbrokenRun) {
  Config config = training_config();
  config.training.global_batch_size = 4;
  std::vector<std::vector<int64_t>> lengths;
  for (int64_t i = 0; i < 19; ++i) lengths.push_back(i % 3 == 0 ? std::vector<int64_t>{24} : std::vector{2 + i % 5});
  const auto rows_of = [&](int ranks, int64_t last, const std::string& load, const std::string& save) {
    const auto dataset = std::make_shared<ReadRows>(lengths, 257);
    run_job(training_job(config, ranks, dataset), [&](RankTrainer& trainer, World&) {
      ReadRows::step = 0;
      if (load.empty()) {
        trainer.initialise_weights();
      } else {
        load_checkpoint(find_checkpoint(load), trainer, CheckpointParts::everything);
        ReadRows::step = read_checkpoint_state(find_checkpoint(load)).step;
      }
      while (ReadRows::step < last) trainer.train_step(++ReadRows::step, false);
      if (!save.empty())
        save_checkpoint(save, trainer,
                        {.step = last, .updates = trainer.updates(), .data_identity = "", .settings = {}}, 0);
    });
    return dataset->seen();
  };
  const ScratchFolder folder;
  std::map<int64_t, std::set<int64_t>> unbroken = rows_of(2, 8, "", "");
  ASSERT_EQ(unbroken.size(), 8u);
  for (const auto& [step, ids] : unbroken) EXPECT_GE(ids.size(), 3u) << "at most one epoch ends in step " << step;
  rows_of(2, 4, "", folder.path());
  for (int64_t step = 1; step <= 4; ++step) unbroken.erase(step);
  for (int ranks : {2, 4, 1}) EXPECT_EQ(rows_of(ranks, 8, folder.path(), ""), unbroken) << "dp " << ranks;
}

// The weights before and after one step without gradient: nothing but decay moves them.
struct DecayStep {
  std::vector<float> before;
  std::vector<float> after;
};

DecayStep step_without_gradient(const Config& config, int64_t step, const std::string& load, const std::string& save) {
  const Job job = job_of(config, {});
  DecayStep result;
  run_job(job, [&](RankTrainer& trainer, World&) {
    trainer.initialise_weights();
    if (!load.empty()) load_checkpoint(find_checkpoint(load), trainer, CheckpointParts::everything);
    result.before = copy_of(trainer, StateKind::weights);
    trainer.train_step(step, false, [&] { set_gradients(trainer, 0); });
    result.after = copy_of(trainer, StateKind::weights);
    if (!save.empty())
      save_checkpoint(save, trainer,
                      {.step = step, .updates = 1, .data_identity = "", .settings = settings_of(job.config)}, 0);
  });
  return result;
}

// A resumed run decays as its own configuration says, from its first step on, and a change is told.
TEST(Checkpoint, B076_TheConfiguredDecayHoldsFromTheFirstResumedStep) {
  Config config = training_config();
  config.optimizer.lr = 0.1;
  config.optimizer.weight_decay = 0.1;
  const ScratchFolder folder;
  const DecayStep saved = step_without_gradient(config, 1, "", folder.path());
  const DecayStep resumed = step_without_gradient(config, 2, folder.path(), "");
  EXPECT_EQ(resumed.before, saved.after);
  const ParameterTable table(job_of(config, {}).config.model);
  for (const Parameter& parameter : table.parameters())
    for (int64_t i = parameter.offset; i < parameter.offset + parameter.shape.numel(); ++i) {
      const size_t at = static_cast<size_t>(i);
      const float factor = parameter.shape.rank() == 2 ? 0.99f : 1.0f;
      ASSERT_NEAR(resumed.after[at], factor * resumed.before[at], 1e-6f * std::abs(resumed.before[at]))
          << parameter.name;
    }

  config.optimizer.weight_decay = 0;
  EXPECT_EQ(step_without_gradient(config, 2, folder.path(), "").after, resumed.before);
  const std::string checkpoint = find_checkpoint(folder.path());
  ::testing::internal::CaptureStderr();
  check_settings(checkpoint, read_checkpoint_state(checkpoint).settings, job_of(config, {}).config, LoadUse::resume);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              ::testing::HasSubstr("optimizer.weight_decay 0.1, goes on with 0"));
}

std::string load_error(const Config& config, const std::string& folder) {
  try {
    run(config, {}, 3, 2, folder, "");
  } catch (const DataError& error) {
    return error.what();
  }
  return "";
}

TEST(Checkpoint, B104_AMissingShardOrTensorIsNamed) {
  namespace fs = std::filesystem;
  const Config config = training_config();
  const ScratchFolder folder;
  run(config, {.tp = 2, .pp = 2}, 1, 2, "", folder.path());
  const fs::path step = fs::path(folder.path()) / "step_2";
  const fs::path shard = step / "weights-tp1-pp0.safetensors";
  const fs::path aside = fs::path(folder.path()) / "aside";
  fs::rename(shard, aside);
  EXPECT_THAT(load_error(config, folder.path()), ::testing::HasSubstr("weights-tp1-pp0.safetensors"));
  const auto metadata = SafetensorsFile::open(aside.string()).metadata();
  for (bool of_this_checkpoint : {false, true}) {
    SafetensorsWriter other(shard.string(), of_this_checkpoint ? metadata : decltype(metadata){});
    other.declare("something.else", DType::f32, {1});
    const float value = 1;
    other.write("something.else", std::as_bytes(std::span(&value, 1)));
    other.finish();
    EXPECT_THAT(
        load_error(config, folder.path()),
        ::testing::HasSubstr(of_this_checkpoint ? "embedding.weight[129:257]" : "belongs to another checkpoint"));
  }
  fs::rename(aside, shard);
  EXPECT_EQ(load_error(config, folder.path()), "");
}

// A tied model has one copy of its embedding in the checkpoint, also where two stages hold it.
TEST(Checkpoint, B103_ATiedModelIsSavedOnceAndTyingIsNamed) {
  Config tied = training_config();
  tied.model.untie_embeddings_and_output_weights = false;
  Config untied = training_config();
  for (const Grid4& grid : {Grid4{}, Grid4{.tp = 2, .pp = 2}}) {
    const ScratchFolder of_tied;
    const ScratchFolder of_untied;
    const State saved = run(tied, grid, 1, 2, "", of_tied.path());
    const State other = run(untied, grid, 1, 2, "", of_untied.path());
    int64_t elements = 0;
    for (const auto& entry : std::filesystem::directory_iterator(of_tied.path() + "/step_2")) {
      if (!entry.path().filename().string().starts_with("weights")) continue;
      const SafetensorsFile file = SafetensorsFile::open(entry.path().string());
      for (const TensorEntry& tensor : file.entries()) {
        EXPECT_FALSE(tensor.name.starts_with("head.weight")) << entry.path();
        elements += tensor.shape.numel();
      }
    }
    EXPECT_EQ(elements, ParameterTable(job_of(tied, {}).config.model).parameter_count()) << grid.text();
    EXPECT_TRUE(run(tied, {}, 3, 2, of_tied.path(), "").weights == saved.weights) << grid.text();
    EXPECT_TRUE(run(untied, {}, 3, 2, of_untied.path(), "").weights == other.weights) << grid.text();
    EXPECT_THAT(load_error(untied, of_tied.path()),
                ::testing::HasSubstr("no tensor head.weight, so its output layer is tied to the embedding; use "
                                     "untie_embeddings_and_output_weights false"));
    EXPECT_THAT(load_error(tied, of_untied.path()), ::testing::HasSubstr("is not tied to the embedding"));
  }
}

// Files that fit each other but not the index: another run's, another step's, or an index that was edited.
TEST(Checkpoint, FilesOfAnotherCheckpointAreRefused) {
  namespace fs = std::filesystem;
  const Config config = training_config();
  const ScratchFolder first;
  const ScratchFolder second;
  run(config, {.tp = 2}, 1, 2, "", first.path());
  run(config, {.tp = 2}, 1, 3, "", second.path());
  const fs::path shard = fs::path(first.path()) / "step_2" / "weights-tp1-pp0.safetensors";
  fs::copy_file(fs::path(second.path()) / "step_3" / "weights-tp1-pp0.safetensors", shard,
                fs::copy_options::overwrite_existing);
  EXPECT_THAT(load_error(config, first.path()), ::testing::HasSubstr("belongs to another checkpoint"));

  const std::string index = second.read("step_3/index.json");
  const size_t updates = index.find("\"updates\": 3");
  ASSERT_NE(updates, std::string::npos);
  second.write("step_3/index.json", std::string(index).replace(updates, 12, "\"updates\": 2"));
  EXPECT_THAT(load_error(config, second.path()), ::testing::HasSubstr("was changed after it was written"));
}

TEST(Checkpoint, B105_AStrayFileIsIgnored) {
  const Config config = training_config();
  const ScratchFolder folder;
  const State saved = run(config, {.tp = 2}, 1, 2, "", folder.path());
  SafetensorsWriter stray(folder.path() + "/step_2/extra.safetensors");
  stray.declare("embedding.weight", DType::f32, {1});
  const float value = 1;
  stray.write("embedding.weight", std::as_bytes(std::span(&value, 1)));
  stray.finish();
  EXPECT_TRUE(run(config, {}, 3, 2, folder.path(), "").weights == saved.weights);
}

}  // namespace
}  // namespace farspan::testing_case
