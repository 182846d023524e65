// SPDX-License-Identifier: Apache-2.0
// The commands of the program, one file each. Each returns the exit status; failures are thrown and caught in main.cpp.
#pragma once

#include "config/command_line.h"

namespace farspan {

int run_train(const CommandLine& line);
int run_plan(const CommandLine& line);
int run_groups(const CommandLine& line);
int run_verify(const CommandLine& line);
int run_eval(const CommandLine& line);
int run_generate(const CommandLine& line);

}  // namespace farspan
