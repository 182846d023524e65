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

TEST(Groups, ReadsTheParallelSectionOfAFile) {
  const TemporaryFolder folder;
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
