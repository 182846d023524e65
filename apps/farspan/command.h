// SPDX-License-Identifier: Apache-2.0
// The commands of the program, one file each. Each returns the exit status; failures are thrown and caught in main.cpp.
#pragma once

#include <string>
#include <vector>

#include "base/log.h"
#include "config/command_line.h"
#include "session.h"

namespace farspan {

// Each on its line of stderr: "farspan: warning: ...".
inline void print_warnings(const std::vector<std::string>& warnings) {
  for (const std::string& warning : warnings) log_warning("{}", warning);
}

int run_train(const CommandLine& line, Session& session);
int run_plan(const CommandLine& line);
int run_groups(const CommandLine& line);
int run_verify(const CommandLine& line, Session& session);
int run_eval(const CommandLine& line, Session& session);
int run_generate(const CommandLine& line);

}  // namespace farspan
