// SPDX-License-Identifier: Apache-2.0
// Memory as the operating system counts it, at sizes where a second copy of anything would show.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <regex>

#include "tests/end_to_end/program.h"

namespace farspan {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;

std::string long_text(const test::ScratchFolder& folder, int64_t bytes) {
  std::string text;
  for (int64_t i = 0; i < bytes; ++i) text += static_cast<char>('a' + (i * i + i / 11) % 26);
  return folder.write("text", text);
}

// The sum of the list under planned_memory_bytes in the last line of metrics.
int64_t planned_bytes(const std::string& metrics) {
  const size_t key = metrics.rfind("\"planned_memory_bytes\":[");
  EXPECT_NE(key, std::string::npos);
  std::istringstream list(metrics.substr(metrics.find('[', key) + 1));
  int64_t total = 0;
  for (int64_t bytes = 0; list >> bytes; list.get()) total += bytes;
  return total;
}

TEST(Memory, ResidentPeakIsThePlanAtSeveralGiB) {
  const test::ScratchFolder folder;
  const std::string text = long_text(folder, 20000);
  const std::string config =
      folder.write("large.yaml",
                   "model:\n  num_layers: 4\n  hidden_size: 768\n  ffn_hidden_size: 2048\n  num_attention_heads: 12\n  "
                   "num_query_groups: 4\n"
                   "data:\n  seq_length: 8192\ntraining:\n  train_iters: 1\n  eval_iters: 0\noutput:\n  keep: 1\n");
  const ProgramResult run = run_program("train " + config + " --path " + text +
                                        " --ranks 4 --context-parallel-size 4 --recompute-granularity none --output " +
                                        folder.path() + "/run");
  ASSERT_EQ(run.status, 0) << run.command << "\n" << run.err;
  const int64_t planned = planned_bytes(folder.read("run/metrics.jsonl"));
  EXPECT_GT(planned, 2 * kGiB);
  EXPECT_LE(run.peak_bytes, planned + planned / 20 + 64 * kMiB) << "planned " << planned;
}

// 131,072 tokens: an S x S buffer of one byte a pair would alone be 16 GiB.
TEST(Memory, B042_OneStepAt131072TokensStaysUnderOneGiB) {
  const test::ScratchFolder folder;
  const std::string text = long_text(folder, 131072);
  const std::string config = folder.write("long.yaml",
                                          "model:\n  num_layers: 2\n  hidden_size: 64\n  num_attention_heads: "
                                          "1\ndata:\n  seq_length: 131072\n  split: \"100,0\"\n"
                                          "training:\n  train_iters: 1\n  eval_iters: 0\n");
  const ProgramResult run = run_program("train " + config + " --path " + text + " --output " + folder.path() + "/run");
  ASSERT_EQ(run.status, 0) << run.command << "\n" << run.err;
  EXPECT_LT(run.peak_bytes, kGiB);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // both reserve terabytes
// Whatever the limit on addresses, a run ends well or says why in one line, never in a signal.
TEST(Memory, ALimitOnAddressesEndsInOneLine) {
  const test::ScratchFolder folder;
  const std::string text = long_text(folder, 4096);
  const std::string config = folder.write("small.yaml",
                                          "model:\n  num_layers: 2\n  hidden_size: 32\n  num_attention_heads: "
                                          "2\ndata:\n  seq_length: 64\n  split: \"100,0\"\n"
                                          "training:\n  train_iters: 1\n  eval_iters: 0\n");
  int refused = 0, done = 0;
  for (int64_t mib : {150, 250, 350, 450, 550, 650, 750, 850, 1500, 32000}) {
    const ProgramResult run = run_program("train " + config + " --ranks 8 --context-parallel-size 8 --path " + text +
                                              " --output " + folder.path() + "/run" + std::to_string(mib),
                                          "", "ulimit -v " + std::to_string(mib * 1024) + "; ");
    // The libraries of a program with CUDA may be more than the smallest limit holds, of which the system's loader
    // tells.
    if (run.status == 127 && run.err.find("while loading shared libraries") != std::string::npos) continue;
    EXPECT_TRUE(run.status == 0 || run.status == 4) << mib << " MiB: " << run.status << "\n" << run.err;
    (run.status == 0 ? done : refused) += 1;
    if (run.status != 4) continue;
    EXPECT_THAT(run.last_error_line(), ::testing::StartsWith("farspan: error: "));
    EXPECT_THAT(run.last_error_line(), ::testing::HasSubstr("ulimit -v"));
  }
  EXPECT_GT(refused, 0);
  EXPECT_GT(done, 0);
}
#endif

}  // namespace
}  // namespace farspan
