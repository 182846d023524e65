// SPDX-License-Identifier: Apache-2.0
// Training through the program: what it writes, that it repeats, resumes, stops in order and refuses in order.
#include <array>
#include <csignal>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <regex>
#include <vector>

#include "tests/end_to_end/program.h"

namespace farspan {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr const char* kConfig =
    "model:\n  num_layers: 2\n  hidden_size: 32\n  num_attention_heads: 4\n  num_query_groups: 2\n  ffn_hidden_size: "
    "64\n"
    "data:\n  seq_length: 48\n  split: \"80,20\"\n"
    "training:\n  train_iters: 6\n  global_batch_size: 2\n  eval_iters: 2\n"
    "optimizer:\n  lr: 5.0e-3\n  lr_decay_iters: 6\n";

// A folder with three small documents and a configuration that trains on them.
class Train : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directory(folder_.path() + "/texts");
    for (const auto& [name, length] : {std::pair{"a", 700}, {"b", 333}, {"c", 41}}) {
      std::string text;
      for (int i = 0; i < length; ++i) text += static_cast<char>('a' + (i * i + i / 7) % 26);
      folder_.write(std::string("texts/") + name, text);
    }
    config_ = folder_.write("small.yaml", kConfig);
  }
  ProgramResult run(const std::string& command, const std::string& flags) {
    return run_program(command + " " + config_ + " --path " + folder_.path() + "/texts " + flags);
  }
  std::string output(const std::string& name) const { return "--output " + folder_.path() + "/" + name; }
  std::string metrics(const std::string& name) const { return folder_.read(name + "/metrics.jsonl"); }

  test::ScratchFolder folder_;
  std::string config_;
};

// Metrics with the figures that depend on the clock taken out.
std::string without_times(const std::string& metrics) {
  static const std::regex times("\"(seconds|tokens_per_second|model_tflops|.._exposed_seconds)\":[^,}]*");
  return std::regex_replace(metrics, times, "\"$1\":0");
}

std::vector<std::string> values(const std::string& metrics, const std::string& kind, const std::string& key) {
  std::vector<std::string> found;
  std::istringstream lines(metrics);
  const std::regex pattern("\"" + key + "\":(\\[[^\\]]*\\]|[^,}]*)");
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (line.find("\"kind\":\"" + kind + "\"") != std::string::npos && std::regex_search(line, match, pattern))
      found.push_back(match[1]);
  }
  return found;
}

TEST_F(Train, WritesTheFilesOfARun) {
  const ProgramResult result = run("train", "--ranks 2 --context-parallel-size 2 " + output("run"));
  ASSERT_EQ(result.status, 0) << result.command << "\n" << result.err;
  // 48 tokens in 4 chunks are few: told once, and nothing else.
  EXPECT_THAT(result.err,
              StartsWith("farspan: warning: context_parallel_size 2 cuts seq_length 48 into chunks of 12 "));
  EXPECT_EQ(result.err.find('\n'), result.err.size() - 1) << result.err;
  const std::string text = metrics("run");
  EXPECT_EQ(values(text, "train", "step"), (std::vector<std::string>{"1", "2", "3", "4", "5", "6"}));
  EXPECT_EQ(values(text, "eval", "step").size(), 1u);
  EXPECT_EQ(values(text, "train", "tokens"), (std::vector<std::string>(6, "96")));
  for (const char* key :
       {"loss", "grad_norm", "lr", "targets", "seconds", "tokens_per_second", "model_tflops", "mfu",
        "peak_memory_bytes", "planned_memory_bytes", "cp_exposed_seconds", "joules_per_token", "skipped"})
    EXPECT_EQ(values(text, "train", key).size(), 6u) << key;
  EXPECT_LT(std::stod(values(text, "train", "loss").back()), std::stod(values(text, "train", "loss").front()));
  EXPECT_THAT(folder_.read("run/config.yaml"), HasSubstr("context_parallel_size: 2  # --context-parallel-size"));
  EXPECT_TRUE(std::filesystem::exists(folder_.path() + "/run/checkpoints/step_6/index.json"));
}

TEST_F(Train, MemoryUsedEqualsThePlanAtTheEnd) {
  ASSERT_EQ(run("train", "--ranks 4 --context-parallel-size 4 --eval-iters 0 " + output("run")).status, 0);
  EXPECT_EQ(values(metrics("run"), "train", "peak_memory_bytes"),
            values(metrics("run"), "train", "planned_memory_bytes"));
}

TEST_F(Train, B027_TheSameCommandTwiceWritesTheSameBits) {
  for (const char* layout : {"--ranks 1", "--ranks 4 --context-parallel-size 2 --precision bf16"}) {
    ASSERT_EQ(run("train", std::string(layout) + " " + output("first")).status, 0);
    ASSERT_EQ(run("train", std::string(layout) + " " + output("second")).status, 0);
    EXPECT_EQ(without_times(metrics("first")), without_times(metrics("second"))) << layout;
  }
}

TEST_F(Train, B117_OneLineAStepWhateverTheRankCount) {
  const ProgramResult result = run("train", "--ranks 4 --context-parallel-size 2 " + output("run"));
  std::istringstream lines(result.out);
  int steps = 0;
  for (std::string line; std::getline(lines, line);) steps += line.starts_with("step ");
  EXPECT_EQ(steps, 6) << result.out;
}

// 8 rows of 48 tokens, however many ranks share a row or its model: the job's own tokens over the step's own seconds.
TEST_F(Train, B119_TokensPerSecondCountTheWholeJobOnce) {
  for (const char* layout :
       {"--ranks 1", "--ranks 4", "--ranks 4 --context-parallel-size 4", "--ranks 4 --tensor-model-parallel-size 4",
        "--ranks 4 --context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
        "--ranks 4 --pipeline-model-parallel-size 2 --zero-stage 2"}) {
    const ProgramResult result =
        run("train", std::string(layout) + " --global-batch-size 8 --train-iters 2 --eval-iters 0 " + output("run"));
    ASSERT_EQ(result.status, 0) << result.command << "\n" << result.err;
    const std::string text = metrics("run");
    EXPECT_EQ(values(text, "train", "tokens"), (std::vector<std::string>{"384", "384"})) << layout;
    const std::vector<std::string> rates = values(text, "train", "tokens_per_second");
    const std::vector<std::string> seconds = values(text, "train", "seconds");
    ASSERT_EQ(rates.size(), 2u);
    for (size_t i = 0; i < 2; ++i) EXPECT_NEAR(std::stod(rates[i]) * std::stod(seconds[i]), 384, 1e-9) << layout;
  }
}

TEST_F(Train, B123_AFlagBeatsTheFileAndTheOriginIsPrintedOnce) {
  const auto last_step = [&](const std::string& flags) {
    const ProgramResult result = run("train", flags + " " + output("run"));
    EXPECT_EQ(result.status, 0) << result.err;
    return values(metrics("run"), "train", "step").back();
  };
  EXPECT_EQ(last_step(""), "6");
  EXPECT_EQ(last_step("--train-iters 3"), "3");
  EXPECT_THAT(folder_.read("run/config.yaml"), HasSubstr("train_iters: 3  # --train-iters"));
}

TEST_F(Train, ResumingContinuesTheUnbrokenRunBitForBit) {
  ASSERT_EQ(run("train", output("whole")).status, 0);
  ASSERT_EQ(run("train", "--train-iters 3 " + output("half")).status, 0);
  ASSERT_EQ(run("train", "--load " + folder_.path() + "/half " + output("rest")).status, 0);
  const std::vector<std::string> whole = values(metrics("whole"), "train", "loss");
  const std::vector<std::string> rest = values(metrics("rest"), "train", "loss");
  ASSERT_EQ(rest.size(), 3u);
  EXPECT_EQ(rest, std::vector<std::string>(whole.begin() + 3, whole.end()));
  EXPECT_EQ(folder_.read("whole/checkpoints/step_6/weights.safetensors"),
            folder_.read("rest/checkpoints/step_6/weights.safetensors"));
  EXPECT_EQ(folder_.read("whole/checkpoints/step_6/optimizer.safetensors"),
            folder_.read("rest/checkpoints/step_6/optimizer.safetensors"));
}

TEST_F(Train, AnotherLayoutLoadsTheCheckpoint) {
  ASSERT_EQ(run("train", output("whole")).status, 0);
  ASSERT_EQ(run("train", "--train-iters 3 " + output("half")).status, 0);
  ASSERT_EQ(
      run("train", "--ranks 4 --context-parallel-size 2 --load " + folder_.path() + "/half " + output("rest")).status,
      0);
  const std::vector<std::string> whole = values(metrics("whole"), "train", "loss");
  const std::vector<std::string> rest = values(metrics("rest"), "train", "loss");
  ASSERT_EQ(rest.size(), 3u);
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(std::stod(rest[i]) / std::stod(whole[3 + i]), 1, 1e-5);
}

TEST_F(Train, B090_OtherDataOnResumeIsRefused) {
  ASSERT_EQ(run("train", "--train-iters 2 " + output("run")).status, 0);
  folder_.write("texts/d", "one more document that was not there before");
  const ProgramResult result = run("train", "--load " + folder_.path() + "/run " + output("again"));
  EXPECT_EQ(result.status, 3);
  EXPECT_THAT(result.last_error_line(), HasSubstr("other data"));
  EXPECT_EQ(run("train", "--load-weights-only --load " + folder_.path() + "/run " + output("again")).status, 0);
}

TEST_F(Train, B097_AMissingOptimizerFileNamesTheOption) {
  ASSERT_EQ(run("train", "--train-iters 2 " + output("run")).status, 0);
  std::filesystem::remove(folder_.path() + "/run/checkpoints/step_2/optimizer.safetensors");
  const ProgramResult result = run("train", "--load " + folder_.path() + "/run " + output("again"));
  EXPECT_EQ(result.status, 3);
  EXPECT_THAT(result.last_error_line(), HasSubstr("load_weights_only"));
}

TEST_F(Train, ACheckpointWithoutItsIndexIsNotLoaded) {
  ASSERT_EQ(run("train", "--train-iters 2 " + output("run")).status, 0);
  std::filesystem::remove(folder_.path() + "/run/checkpoints/step_2/index.json");
  const ProgramResult result = run("train", "--load " + folder_.path() + "/run " + output("again"));
  EXPECT_EQ(result.status, 3);
  EXPECT_THAT(result.last_error_line(), HasSubstr("no complete checkpoint"));
}

TEST_F(Train, AnEarlierRunIsMovedAsideAndKeepNeverDropsTheNewest) {
  ASSERT_EQ(run("train", "--train-iters 5 " + output("run")).status, 0);
  const std::string first = metrics("run");
  ASSERT_EQ(run("train", "--train-iters 3 --save-interval 1 --keep 2 " + output("run")).status, 0);
  const std::string folder = folder_.path() + "/run";
  EXPECT_TRUE(std::filesystem::exists(folder + "/checkpoints.earlier-1/step_5/index.json"));
  EXPECT_EQ(folder_.read("run/metrics.jsonl.earlier-1"), first);
  EXPECT_FALSE(std::filesystem::exists(folder + "/checkpoints/step_1"));
  EXPECT_TRUE(std::filesystem::exists(folder + "/checkpoints/step_2/index.json"));
  EXPECT_TRUE(std::filesystem::exists(folder + "/checkpoints/step_3/index.json"));
}

TEST_F(Train, ACheckpointOfAnotherModelOrPlaceInTheDataIsRefused) {
  ASSERT_EQ(run("train", "--train-iters 2 " + output("run")).status, 0);
  const std::string load = " --load " + folder_.path() + "/run ";
  const auto refused = [&](const std::string& command, const std::string& flags, const std::string& key) {
    const ProgramResult result = run(command, flags + load + (command == "train" ? output("again") : ""));
    EXPECT_EQ(result.status, 3) << result.command;
    EXPECT_THAT(result.last_error_line(), HasSubstr(key));
  };
  refused("eval", "--num-attention-heads 2 --num-query-groups 1 --kv-channels 16", "model.kv_channels");
  refused("eval", "--rotary-base 77", "model.rotary_base");
  refused("generate", "--prompt a --window-size 3", "model.window_size");
  refused("train", "--seed 99", "training.seed");
  refused("train", "--global-batch-size 4", "training.global_batch_size");
  refused("train", "--optimizer sgd", "optimizer.optimizer");
  const ProgramResult adapted = run("train", "--load-weights-only --rotary-base 77" + load + output("again"));
  EXPECT_EQ(adapted.status, 0) << adapted.err;
  EXPECT_THAT(adapted.err, HasSubstr("model.rotary_base"));
}

TEST_F(Train, ADamagedCheckpointIsRefused) {
  ASSERT_EQ(run("train", "--train-iters 2 " + output("run")).status, 0);
  const std::string checkpoint = "run/checkpoints/step_2/";
  const std::string load = "--load " + folder_.path() + "/run ";
  const std::string weights = folder_.read(checkpoint + "weights.safetensors");
  std::string damaged = weights;
  for (size_t i = damaged.size() - 400; i < damaged.size(); ++i) damaged[i] = '\xff';
  folder_.write(checkpoint + "weights.safetensors", damaged);
  EXPECT_EQ(run("eval", load).status, 3);
  folder_.write(checkpoint + "weights.safetensors", weights);
  EXPECT_EQ(run("eval", load).status, 0);
  const std::string index = folder_.read(checkpoint + "index.json");
  for (const auto& [from, to] : {std::pair{"\"step\": 2", "\"step\": -5"}, {"weights.safetensors", "../evil"}}) {
    std::string edited = index;
    edited.replace(edited.find(from), std::string(from).size(), to);
    folder_.write(checkpoint + "index.json", edited);
    EXPECT_EQ(run("train", load + output("again")).status, 3) << to;
  }
}

TEST_F(Train, AfterAResumeInPlaceEveryStepStandsOnce) {
  ASSERT_EQ(run("train", "--save-interval 2 " + output("run")).status, 0);
  ASSERT_EQ(run("train", "--load " + folder_.path() + "/run/checkpoints/step_2 " + output("run")).status, 0);
  EXPECT_EQ(values(metrics("run"), "train", "step"), (std::vector<std::string>{"1", "2", "3", "4", "5", "6"}));
}

TEST_F(Train, PlacesToWriteAreTriedBeforeTheFirstStep) {
  folder_.write("file", "");
  const ProgramResult result = run("train", "--save " + folder_.path() + "/file/x " + output("run"));
  EXPECT_EQ(result.status, 3);
  EXPECT_THAT(result.out, ::testing::Not(HasSubstr("step 1/")));
}

TEST_F(Train, EvaluationAndGenerationReadTheCheckpoint) {
  ASSERT_EQ(run("train", output("run")).status, 0);
  const std::string load = " --load " + folder_.path() + "/run";
  const ProgramResult one = run("eval", "--ranks 1" + load);
  const ProgramResult four = run("eval", "--ranks 4 --context-parallel-size 4" + load);
  ASSERT_EQ(one.status, 0) << one.err;
  ASSERT_EQ(four.status, 0) << four.err;
  EXPECT_EQ(one.out.substr(0, one.out.find("loss") + 9), four.out.substr(0, four.out.find("loss") + 9));
  const ProgramResult text = run("generate", "--max-tokens 20 --prompt abc" + load);
  EXPECT_EQ(text.status, 0) << text.err;
  EXPECT_THAT(text.out, StartsWith("abc"));
  EXPECT_GT(text.out.size(), 4u);
  EXPECT_EQ(run("generate", "--max-tokens 20 --prompt abc" + load).out, text.out);
}

TEST_F(Train, GenerationPastTheContextSaysWhatIsSeen) {
  ASSERT_EQ(run("train", output("run")).status, 0);
  const std::string load = " --load " + folder_.path() + "/run";
  const ProgramResult within = run("generate", "--max-tokens 5 --prompt abc" + load);
  EXPECT_EQ(within.status, 0) << within.err;
  EXPECT_THAT(within.err, ::testing::Not(HasSubstr("warning")));
  const ProgramResult past = run("generate", "--seq-length 8 --max-tokens 20 --prompt abcdef" + load);
  EXPECT_EQ(past.status, 0) << past.err;
  EXPECT_THAT(past.err,
              HasSubstr("a prompt of 6 tokens and 20 more pass seq_length 8: each new token sees the last 8"));
  EXPECT_THAT(past.out, StartsWith("abcdef"));
  const ProgramResult prompt_alone = run("generate", "--seq-length 4 --max-tokens 1 --prompt abcdef" + load);
  EXPECT_EQ(prompt_alone.status, 0) << prompt_alone.err;
}

// No length asked for ends in a crash, or in a run that cannot end.
TEST_F(Train, GenerationOfMoreThanFitsIsRefused) {
  ASSERT_EQ(run("train", output("run")).status, 0);
  const std::string load = " --load " + folder_.path() + "/run";
  const ProgramResult memory = run("generate", "--max-tokens 1000000000 --seq-length 2000000000 --prompt abc" + load);
  EXPECT_EQ(memory.status, 4) << memory.err;
  EXPECT_THAT(memory.last_error_line(), HasSubstr("the plan needs"));
  EXPECT_EQ(memory.out, "");
  const ProgramResult bound = run("generate", "--max-tokens 9223372036854775807 --prompt abc" + load);
  EXPECT_EQ(bound.status, 2) << bound.err;
  EXPECT_THAT(bound.last_error_line(), HasSubstr("use at most 1000000000"));
}

TEST_F(Train, VerifyAgreesAndPlanNeedsNoData) {
  EXPECT_EQ(run("verify", "--ranks 4 --context-parallel-size 4").status, 0);
  EXPECT_EQ(run("verify", "--ranks 4 --context-parallel-size 2 --cp-comm-type all_gather --json").status, 0);
  const ProgramResult plan = run_program("plan " + config_ + " --path " + folder_.path() +
                                         "/nothing --ranks 8 --context-parallel-size 8 --json");
  EXPECT_EQ(plan.status, 0) << plan.err;
  for (const char* piece : {"\"fits\":true", "\"ranks\":[{\"rank\":0,\"peak_bytes\":", "\"by_purpose\":{\"weights\":",
                            "\"exposed_communication_seconds\":", "\"bytes\":{\"tp\":0,\"cp\":", "\"assumptions\":"})
    EXPECT_THAT(plan.out, HasSubstr(piece));
}

void expect_failure(const ProgramResult& result, int status, const std::string& reason) {
  EXPECT_EQ(result.status, status) << result.command << "\n" << result.err;
  EXPECT_THAT(result.last_error_line(), StartsWith("farspan: error: ")) << result.command;
  EXPECT_THAT(result.last_error_line(), HasSubstr(reason)) << result.command;
  EXPECT_THAT(result.out, ::testing::Not(HasSubstr("step 1/"))) << "said before any training step";
}

TEST_F(Train, BadInputIsOneLineWithTheRightStatus) {
  expect_failure(run_program("train " + config_ + " --path " + folder_.path() + "/missing " + output("r")), 3,
                 "missing");
  std::filesystem::create_directory(folder_.path() + "/empty");
  expect_failure(run_program("train " + config_ + " --path " + folder_.path() + "/empty " + output("r")), 3, "empty");
  expect_failure(run("train", "--memory-limit 1000 " + output("r")), 4, "the limit is 1000");
  expect_failure(run("train", "--ranks 3 --context-parallel-size 2 " + output("r")), 2, "multiple of 2");
  expect_failure(run("train", "--num-query-groups 3 " + output("r")), 2, "num_query_groups");
  expect_failure(run("train", "--vocab-size 100 " + output("r")), 3, "100");
  expect_failure(run("train", "--contxt-parallel-size 2 " + output("r")), 2, "context-parallel-size");
  expect_failure(run("train", "--load " + folder_.path() + "/nowhere " + output("r")), 3, "nowhere");
  expect_failure(run("train", "--output /proc/farspan"), 3, "/proc/farspan");
  expect_failure(run("plan", "--memory-limit 1000"), 4, "the limit is 1000");
}

// Both are watched from outside: the numbers of the run stay the same.
TEST_F(Train, ProfileAndTraceTellOfEveryRank) {
  const std::string ranks = "--ranks 4 --context-parallel-size 2 ";
  ASSERT_EQ(run("train", ranks + output("plain")).status, 0);
  const ProgramResult watched = run("train", ranks + "--profile --trace " + output("watched"));
  ASSERT_EQ(watched.status, 0) << watched.err;
  EXPECT_EQ(without_times(metrics("watched")), without_times(metrics("plain")));
  EXPECT_FALSE(std::filesystem::exists(folder_.path() + "/plain/profile.json"));
  EXPECT_THAT(watched.out, ContainsRegex("profile of rank 0\n5 steps of"));
  EXPECT_THAT(watched.out, ContainsRegex("attention_block_forward .* TFLOP/s"));
  const nlohmann::json profile = nlohmann::json::parse(folder_.read("watched/profile.json"));
  ASSERT_EQ(profile["ranks"].size(), 4u);
  for (const nlohmann::json& rank : profile["ranks"]) EXPECT_EQ(rank["steps"], 5);
  const nlohmann::json trace = nlohmann::json::parse(folder_.read("watched/trace.json"));
  std::array<double, 4> seconds{};  // in ops
  for (const nlohmann::json& event : trace["traceEvents"])
    if (event["ph"] == "X" && event["tid"] == 100) seconds[event["pid"]] += event["dur"].get<double>() * 1e-6;
  for (double of_rank : seconds) EXPECT_GT(of_rank, 0);
  // Those of the next run stand in their place, and nothing is lost.
  ASSERT_EQ(run("train", ranks + "--trace " + output("watched")).status, 0);
  EXPECT_TRUE(std::filesystem::exists(folder_.path() + "/watched/profile.json.earlier-1"));
  EXPECT_FALSE(std::filesystem::exists(folder_.path() + "/watched/profile.json"));
}

// Nothing of the run is left.
TEST_F(Train, B113_AnInterruptSavesAndEndsWithItsStatus) {
  const std::string log = folder_.path() + "/log";
  const std::string command = std::string(std::getenv("FARSPAN_PROGRAM")) + " train " + config_ + " --path " +
                              folder_.path() + "/texts --ranks 4 --context-parallel-size 2 --train-iters 1000000 " +
                              output("run") + " >" + log + " 2>&1";
  const pid_t child = fork();
  if (child == 0) {
    execl("/bin/sh", "sh", "-c", ("exec " + command).c_str(), nullptr);
    _exit(127);
  }
  for (int i = 0; i < 300 && metrics("run").find("\"step\":3,") == std::string::npos; ++i) usleep(50000);
  const ProgramResult second = run("train", output("run"));
  EXPECT_EQ(second.status, 2) << "two runs in one folder";
  EXPECT_THAT(second.last_error_line(), HasSubstr("another run"));
  kill(child, SIGTERM);
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGTERM) << folder_.read("log");
  const std::string last = values(metrics("run"), "train", "step").back();
  EXPECT_TRUE(std::filesystem::exists(folder_.path() + "/run/checkpoints/step_" + last + "/index.json")) << last;
}

}  // namespace
}  // namespace farspan
