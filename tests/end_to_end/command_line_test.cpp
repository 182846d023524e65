// SPDX-License-Identifier: Apache-2.0
// The program's frame: exit statuses, the last line on stderr, help, and who may start it.
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sstream>

#include "tests/end_to_end/program.h"

namespace farspan {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// Fails with status 2, says `reason` in the last line on stderr, and prints nothing on stdout.
void expect_refused(const std::string& arguments, const std::string& reason, const std::string& environment = "") {
  const ProgramResult result = run_program(arguments, environment);
  EXPECT_EQ(result.status, 2) << result.command << "\n" << result.err;
  EXPECT_EQ(result.out, "") << result.command;
  EXPECT_THAT(result.last_error_line(), StartsWith("farspan: error: ")) << result.command;
  EXPECT_THAT(result.last_error_line(), HasSubstr(reason)) << result.command;
}

TEST(Program, HelpAndVersion) {
  for (const char* arguments :
       {"--help", "train --help", "plan --help", "verify --help", "eval --help", "generate --help"}) {
    const ProgramResult help = run_program(arguments);
    EXPECT_EQ(help.status, 0) << help.command;
    EXPECT_EQ(help.err, "") << help.command;
    for (const char* piece :
         {"\nmodel:\n", "--num-layers", "\nparallel:\n", "--context-parallel-size", "\noutput:\n"}) {
      EXPECT_THAT(help.out, HasSubstr(piece)) << help.command;
    }
  }
}

// The version stands in the build file for packagers and in the program for its users.
TEST(Program, VersionIsTheBuildFiles) {
  const char* source = std::getenv("FARSPAN_SOURCE");
  ASSERT_NE(source, nullptr) << "set FARSPAN_SOURCE to the folder of the sources";
  const ProgramResult result = run_program("--version");
  ASSERT_THAT(result.out, StartsWith("farspan ")) << result.command;
  const std::string version = result.out.substr(8, result.out.size() - 9);
  std::ostringstream build_file;
  build_file << std::ifstream(std::string(source) + "/CMakeLists.txt").rdbuf();
  EXPECT_THAT(build_file.str(), HasSubstr("VERSION " + version + " ")) << result.command;
}

TEST(Program, BadCommandLinesAreRefused) {
  expect_refused("", "no command given");
  expect_refused("grups", "unknown command grups, did you mean groups?");
  for (const std::string later : {"prepare", "import", "export", "doctor", "bench", "report"}) {
    expect_refused(later + " x", "the command " + later + " is not in this version");
  }
  expect_refused("train", "no config file given");
  expect_refused("groups --contxt-parallel-size 4", "did you mean --context-parallel-size?");
  expect_refused("groups --ranks 0", "--ranks 0 is too small; use 1 or more");
  expect_refused("groups --ranks 1000000", "--ranks 1000000 is too large");
  expect_refused("groups --context-parallel-size four",
                 "--context-parallel-size: expected an integer such as 1024, 1_024 or 1e3, found \"four\"");
  expect_refused("groups 'no such\nfile.yaml'", "does not exist");
  expect_refused("train x.yaml --output ''", "--output is empty; name a folder");
  expect_refused("groups --ranks-per-host 0", "--ranks-per-host 0 is too small; use 1 or more");
  expect_refused("groups /dev/zero", "config file /dev/zero is a pipe or a device; name a YAML file");
}

TEST(Program, B122_MistakesInTheFileNameTheLine) {
  const test::ScratchFolder folder;
  const std::string unknown = folder.write("a.yaml", "# comment\nparallel:\n  contxt_parallel: 2\n");
  expect_refused("groups " + unknown,
                 "a.yaml:3: unknown key parallel.contxt_parallel; did you mean context_parallel_size?");
  const std::string section = folder.write("b.yaml", "parallel:\n  train_iters: 2\n");
  expect_refused("groups " + section,
                 "b.yaml:2: key parallel.train_iters does not belong here; it belongs in section training");
  const std::string twice =
      folder.write("c.yaml", "parallel:\n  context_parallel_size: 2\n  context_parallel_size: 2\n");
  expect_refused("groups " + twice, "c.yaml:3: parallel.context_parallel_size is given twice, first in line 2");
}

TEST(Program, B121_NumbersInTheFileAreReadOrRefusedWithTheLine) {
  const test::ScratchFolder folder;
  for (const char* lr : {"2e-5", "2.0e-5", "0.00002", "2E-5"}) {
    const std::string good = folder.write("good.yaml", std::string("optimizer:\n  lr: ") + lr + "\n");
    EXPECT_EQ(run_program("groups " + good).status, 0) << lr;
  }
  expect_refused("groups " + folder.write("bad.yaml", "optimizer:\n  lr: 2e-5x\n"),
                 "bad.yaml:2: optimizer.lr: expected a number");
}

TEST(Program, B123_AFlagBeatsTheFile) {
  const test::ScratchFolder folder;
  const std::string file = folder.write("a.yaml", "parallel:\n  context_parallel_size: 4\n");
  EXPECT_THAT(run_program("groups --json " + file).out, StartsWith("{\"world_size\":4,"));
  EXPECT_THAT(run_program("groups --json --context-parallel-size 2 " + file).out, StartsWith("{\"world_size\":2,"));
  EXPECT_THAT(run_program("groups --json --context-parallel-size 1 " + file).out, StartsWith("{\"world_size\":1,"));
}

TEST(Program, B114_SeveralLaunchedProcessesAreRefused) {
  expect_refused("groups --ranks 2", "(OMPI_COMM_WORLD_SIZE=2)", "OMPI_COMM_WORLD_SIZE=2");
  expect_refused("groups --ranks 2", "(PMI_SIZE=4)", "PMI_SIZE=4");
  expect_refused("groups --ranks 2", "(SLURM_STEP_NUM_TASKS=2)", "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0");
  expect_refused("groups --ranks 2", "(SLURM_NTASKS=2)", "SLURM_NTASKS=2 SLURM_PROCID=1");
  EXPECT_EQ(run_program("groups --ranks 2", "OMPI_COMM_WORLD_SIZE=1").status, 0);
  EXPECT_EQ(run_program("--version", "OMPI_COMM_WORLD_SIZE=2").status, 0);
}

TEST(Program, OutputThatCannotBeWrittenIsAnError) {
  // An inner shell owns the redirection, and "$0" is the program's own path in it.
  const ProgramResult result = run_program("", "sh -c '\"$0\" groups --ranks 2 >/dev/full'");
  EXPECT_EQ(result.status, 3) << result.command << "\n" << result.err;
  EXPECT_EQ(result.last_error_line(), "farspan: error: standard output cannot be written") << result.command;
}

}  // namespace
}  // namespace farspan
