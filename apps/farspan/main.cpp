// SPDX-License-Identifier: Apache-2.0
// The program: finds the command, runs it, and turns a failure into one last line on stderr and an exit status.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "command.h"
#include "config/command_line.h"
#include "config/launch.h"

namespace farspan {
namespace {

struct Command {
  CommandSpec spec;
  int (*run)(const CommandLine& line);
};

const std::vector<Command>& commands() {
  using enum CommandOption;
  static const std::vector<Command> table = {
      {{"train", "train a model", true, "", {ranks, output}}, run_train},
      {{"plan", "memory, communication and time of a run, without running it", true, "", {ranks, json}}, run_plan},
      {{"groups", "which rank is in which group", false, "parallel", {ranks, json}}, run_groups},
      {{"verify", "this layout against one rank: loss, gradient norm, every gradient", true, "", {ranks, json}},
       run_verify},
      {{"eval", "loss and perplexity on the held-out split", true, "", {ranks}}, run_eval},
      {{"generate", "continue a prompt", true, "", {ranks, prompt, max_tokens, temperature}}, run_generate},
  };
  return table;
}

int run(const std::vector<std::string>& arguments) {
  std::vector<CommandSpec> specs;
  for (const Command& command : commands()) specs.push_back(command.spec);
  const CommandLine line = parse_command_line(arguments, specs);
  if (!line.printout.empty()) {
    std::fputs(line.printout.c_str(), stdout);
    return 0;
  }
  refuse_process_launchers([](const char* name) { return std::getenv(name); });
  for (const Command& command : commands()) {
    if (command.spec.name == line.command) return command.run(line);
  }
  throw InternalError("no command " + line.command);
}

// The last line on stderr, after everything the command itself printed.
void print_error(const char* message) {
  std::fflush(stdout);
  std::fprintf(stderr, "farspan: error: %s\n", one_line(message).c_str());
}

}  // namespace
}  // namespace farspan

int main(int argc, char** argv) {
  try {
    const int status = farspan::run(std::vector<std::string>(argv + (argc > 0 ? 1 : 0), argv + argc));
    if (std::fflush(stdout) != 0) throw farspan::DataError("standard output cannot be written");
    return status;
  } catch (const farspan::Error& error) {
    farspan::print_error(error.what());
    return error.exit_status();
  } catch (const std::bad_alloc&) {
    farspan::print_error("the system has no more memory to give; see what fits with farspan plan");
    return static_cast<int>(farspan::ErrorKind::memory);
  } catch (const std::exception& error) {
    farspan::print_error(error.what());
    return static_cast<int>(farspan::ErrorKind::internal);
  }
}
