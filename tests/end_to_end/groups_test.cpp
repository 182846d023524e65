// SPDX-License-Identifier: Apache-2.0
// farspan groups, as other people's scripts call it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/end_to_end/program.h"

namespace farspan {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(Groups, JsonOfTwoTensorByFourContextParallelRanks) {
  const ProgramResult result =
      run_program("groups --ranks 8 --tensor-model-parallel-size 2 --context-parallel-size 4 --json");
  EXPECT_EQ(result.status, 0) << result.command << "\n" << result.err;
  EXPECT_EQ(result.out,
            "{\"world_size\":8,\"sizes\":{\"tp\":2,\"cp\":4,\"dp\":1,\"pp\":1},\"groups\":{"
            "\"tp\":[[0,1],[2,3],[4,5],[6,7]],\"cp\":[[0,2,4,6],[1,3,5,7]],"
            "\"dp\":[[0],[1],[2],[3],[4],[5],[6],[7]],\"pp\":[[0],[1],[2],[3],[4],[5],[6],[7]],"
            "\"dp_cp\":[[0,2,4,6],[1,3,5,7]]}}\n")
      << result.command;
  EXPECT_EQ(result.err, "") << result.command;
}

TEST(Groups, WithoutRanksTheWorldIsTheProductOfTheParallelSizes) {
  const ProgramResult result = run_program(
      "groups --tensor-model-parallel-size 2 --context-parallel-size 2 --pipeline-model-parallel-size 2 --json");
  EXPECT_EQ(result.status, 0) << result.command << "\n" << result.err;
  EXPECT_THAT(result.out, StartsWith("{\"world_size\":8,\"sizes\":{\"tp\":2,\"cp\":2,\"dp\":1,\"pp\":2}"))
      << result.command;
  EXPECT_THAT(result.out, HasSubstr("\"pp\":[[0,4],[1,5],[2,6],[3,7]]")) << result.command;
}

TEST(Groups, DataParallelRanksFillTheWorld) {
  const ProgramResult result = run_program("groups --ranks 8 --context-parallel-size 2 --json");
  EXPECT_EQ(result.status, 0) << result.command << "\n" << result.err;
  EXPECT_THAT(result.out, HasSubstr("\"sizes\":{\"tp\":1,\"cp\":2,\"dp\":4,\"pp\":1}")) << result.command;
  EXPECT_THAT(result.out, HasSubstr("\"cp\":[[0,1],[2,3],[4,5],[6,7]],\"dp\":[[0,2,4,6],[1,3,5,7]]")) << result.command;
  EXPECT_THAT(result.out, HasSubstr("\"dp_cp\":[[0,1,2,3,4,5,6,7]]")) << result.command;
}

TEST(Groups, RankOrderDecidesWhoAreNeighbours) {
  const ProgramResult result = run_program(
      "groups --ranks 4 --tensor-model-parallel-size 2 --context-parallel-size 2 --rank-order cp-tp-dp-pp --json");
  EXPECT_THAT(result.out, HasSubstr("\"tp\":[[0,2],[1,3]],\"cp\":[[0,1],[2,3]]")) << result.command << "\n"
                                                                                  << result.err;
}

TEST(Groups, TheMapNamesSizesGroupsHostsAndCoordinates) {
  const ProgramResult result = run_program("groups --ranks 4 --context-parallel-size 2");
  EXPECT_EQ(result.status, 0) << result.command << "\n" << result.err;
  EXPECT_EQ(result.out,
            "world 4 = tp 1 x cp 2 x dp 2 x pp 1, order tp-cp-dp-pp (fastest first)\n"
            "tp     [0] [1] [2] [3]\n"
            "cp     [0,1] [2,3]\n"
            "dp     [0,2] [1,3]\n"
            "pp     [0] [1] [2] [3]\n"
            "dp_cp  [0,1,2,3]\n"
            "host 0 ranks 0 to 3, threads of one process\n"
            "\n"
            "rank    tp    cp    dp    pp\n"
            "   0     0     0     0     0\n"
            "   1     0     1     0     0\n"
            "   2     0     0     1     0\n"
            "   3     0     1     1     0\n")
      << result.command;
}

TEST(Groups, SixtyFourRanksOfFourByTwoByFour) {
  const ProgramResult result = run_program(
      "groups --ranks 64 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --context-parallel-size 4 "
      "--json");
  EXPECT_EQ(result.status, 0) << result.command << "\n" << result.err;
  EXPECT_THAT(result.out, HasSubstr("\"sizes\":{\"tp\":4,\"cp\":4,\"dp\":2,\"pp\":2}")) << result.command;
}

TEST(Groups, RanksPerHostShowWhichEdgesCrossMachines) {
  const std::string sizes = "groups --ranks 8 --tensor-model-parallel-size 2 --context-parallel-size 4 ";
  const ProgramResult text = run_program(sizes + "--ranks-per-host 4");
  EXPECT_EQ(text.status, 0) << text.command << "\n" << text.err;
  EXPECT_EQ(text.err, "") << text.command;
  EXPECT_THAT(text.out, HasSubstr("host 0 ranks 0 to 3\nhost 1 ranks 4 to 7\n")) << text.command;
  EXPECT_THAT(text.out,
              HasSubstr("\ncp           2       4       8             4                   -   2-4 6-0 3-5 7-1\n"))
      << text.command << "\n"
      << text.out;
  EXPECT_THAT(text.out, HasSubstr("\ntp           4       2       4             0                   -\n")) << text.out;

  const ProgramResult json = run_program(sizes + "--ranks-per-host 4 --json");
  EXPECT_THAT(json.out, HasSubstr("\"dp_cp\":[[0,2,4,6],[1,3,5,7]]},\"hosts\":[[0,1,2,3],[4,5,6,7]],\"edges\":{"
                                  "\"tp\":{\"all\":4,\"across_hosts\":[]},"
                                  "\"cp\":{\"all\":8,\"across_hosts\":[[2,4],[6,0],[3,5],[7,1]]},"))
      << json.command;

  const ProgramResult torn = run_program(sizes + "--ranks-per-host 3");
  EXPECT_THAT(torn.err, StartsWith("farspan: warning: tensor groups of 2 ranks cross 1 of 2 machine borders"))
      << torn.command;
}

// The bytes of the dry record: those of a plan, by dimension.
TEST(Groups, WithAModelTheBytesOfAStepAreShown) {
  const test::ScratchFolder folder;
  const std::string file = folder.write(
      "legal.yaml", "model:\n  num_layers: 2\n  hidden_size: 32\n  vocab_size: 257\ndata:\n  seq_length: 1024\n");
  const ProgramResult groups =
      run_program("groups " + file + " --ranks 4 --context-parallel-size 2 --cp-comm-type all_gather --json");
  EXPECT_EQ(groups.status, 0) << groups.command << "\n" << groups.err;
  EXPECT_EQ(groups.err, "") << groups.command;
  const ProgramResult plan =
      run_program("plan " + file + " --ranks 4 --context-parallel-size 2 --cp-comm-type all_gather --json");
  EXPECT_EQ(plan.status, 0) << plan.command << "\n" << plan.err;
  const auto cp_bytes = [](const std::string& text) {
    const size_t begin = text.find("\"cp\":", std::max(text.find("\"bytes"), size_t{1}));
    return text.substr(begin, text.find(',', begin) - begin);
  };
  EXPECT_THAT(groups.out, HasSubstr("\"bytes_per_step\":{\"tp\":0,\"cp\":")) << groups.command;
  EXPECT_NE(cp_bytes(groups.out.substr(groups.out.find("\"bytes_per_step\""))), "\"cp\":0") << groups.command;
  EXPECT_EQ(cp_bytes(groups.out.substr(groups.out.find("\"bytes_per_step\""))),
            cp_bytes(plan.out.substr(plan.out.find("\"bytes\""))))
      << groups.command;
}

// Each rank asks for its groups, and the map has a line for each: neither may cost the square of the world.
TEST(Groups, SixtyFiveThousandRanksTakeSeconds) {
  const ProgramResult result = run_program(
      "groups --ranks 65536 --tensor-model-parallel-size 8 --context-parallel-size 32 "
      "--pipeline-model-parallel-size 16 --ranks-per-host 8");
  EXPECT_EQ(result.status, 0) << result.command << "\n" << result.err;
  EXPECT_THAT(result.out, HasSubstr("host 8191 ranks 65528 to 65535\n")) << result.command;
  EXPECT_LT(result.seconds, 20) << result.command;  // a quadratic search takes minutes
}

TEST(Groups, WrongValuesOfTheParallelSectionAreRefused) {
  const ProgramResult result = run_program("groups --zero-stage 7");
  EXPECT_EQ(result.status, 2) << result.command;
  EXPECT_EQ(result.last_error_line(), "farspan: error: zero_stage 7 is none; use 0, 1, 2 or 3") << result.command;
}

TEST(Groups, ReadsTheParallelSectionOfAFile) {
  const test::ScratchFolder folder;
  const std::string file =
      folder.write("legal.yaml", "model:\n  num_layers: 4\nparallel:\n  context_parallel_size: 4\n");
  const ProgramResult from_file = run_program("groups " + file + " --json");
  EXPECT_THAT(from_file.out, HasSubstr("\"cp\":[[0,1,2,3]]")) << from_file.command << "\n" << from_file.err;
  const ProgramResult from_flag = run_program("groups " + file + " --context-parallel-size 2 --json");
  EXPECT_THAT(from_flag.out, HasSubstr("\"cp\":[[0,1]]")) << from_flag.command << "\n" << from_flag.err;
}

TEST(Groups, B011_WorldThatDoesNotFitNamesWorldsThatDo) {
  const ProgramResult result = run_program(
      "groups --ranks 63 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --context-parallel-size 4 "
      "--json");
  EXPECT_EQ(result.status, 2) << result.command;
  EXPECT_EQ(result.out, "") << result.command;
  EXPECT_THAT(result.last_error_line(), StartsWith("farspan: error: world 63, need a multiple of 32"))
      << result.command;
  EXPECT_THAT(result.last_error_line(), HasSubstr("use 32 or 64 ranks")) << result.command;
}

}  // namespace
}  // namespace farspan
