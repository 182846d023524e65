// SPDX-License-Identifier: Apache-2.0
// Runs the program that FARSPAN_PROGRAM names, as a user would from a shell.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <gtest/gtest.h>
#include <string>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/scratch_folder.h"

namespace farspan {

struct ProgramResult {
  std::string command;  // repeats the run by hand
  int status = -1;      // exit status; -1 when a signal ended it
  double seconds = 0;
  int64_t peak_bytes = 0;  // largest resident memory, as the system counted it
  std::string out;
  std::string err;
  // The last line of stderr, without its line break.
  std::string last_error_line() const {
    const std::string text = err.substr(0, err.find_last_not_of('\n') + 1);
    const size_t line_break = text.rfind('\n');
    return line_break == std::string::npos ? text : text.substr(line_break + 1);
  }
};

// `arguments` as in a shell; `environment`: "NAME=value ..." for this run. Variables of process launchers are unset, so
// that the tests themselves may run inside a batch job, and no GPU is seen: what is expected is of a CPU.
// `first`: what the shell does before it becomes the program, such as "ulimit -v 1000000; ".
inline ProgramResult run_program(const std::string& arguments, const std::string& environment = "",
                                 const std::string& first = "") {
  const char* program = std::getenv("FARSPAN_PROGRAM");
  if (program == nullptr) {
    ADD_FAILURE() << "set FARSPAN_PROGRAM to the program to test, such as build/release/farspan";
    return {};
  }
  const test::ScratchFolder folder;
  ProgramResult result;
  result.command =
      first +
      "exec env -u OMPI_COMM_WORLD_SIZE -u PMI_SIZE -u SLURM_NTASKS -u SLURM_PROCID -u SLURM_STEP_NUM_TASKS -u "
      "SLURM_STEP_TASKS_PER_NODE CUDA_VISIBLE_DEVICES= " +
      environment + " " + program + " " + arguments;
  const std::string redirected = result.command + " >" + folder.path("out") + " 2>" + folder.path("err");
  const auto start = std::chrono::steady_clock::now();
  const pid_t child = fork();
  if (child == 0) {
    execl("/bin/sh", "sh", "-c", redirected.c_str(), nullptr);
    _exit(127);
  }
  int status = 0;
  rusage usage{};
  wait4(child, &status, 0, &usage);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  result.peak_bytes = int64_t{1024} * usage.ru_maxrss;
  result.out = folder.read("out");
  result.err = folder.read("err");
  return result;
}

}  // namespace farspan
