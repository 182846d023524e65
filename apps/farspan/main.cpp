// SPDX-License-Identifier: Apache-2.0
// The program: finds the command, runs it, and turns a failure into one last line on stderr and an exit status.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fmt/format.h>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "command.h"
#include "config/command_line.h"
#include "config/launch.h"
#include "session.h"

namespace farspan {
namespace {

struct Command {
  CommandSpec spec;
  std::function<int(const CommandLine& line, Session& session)> run;
};

using OneProcessCommand = int (*)(const CommandLine& line);

// A command that computes on paper: of several processes one does it.
auto by_one_process(OneProcessCommand run) {
  return [run](const CommandLine& line, Session& session) { return session.speaks() ? run(line) : 0; };
}

// A command whose ranks are the threads of one process.
auto with_thread_ranks(OneProcessCommand run) {
  return [run](const CommandLine& line, Session& session) {
    if (session.launch().processes > 1)
      throw ConfigError(fmt::format("{} runs in one process, but {}; start it without the launcher", line.command,
                                    session.launch().claim));
    return run(line);
  };
}

const std::vector<Command>& commands() {
  using enum CommandOption;
  static const std::vector<Command> table = {
      {{"train", "train a model", true, "", {ranks, output, profile}}, run_train},
      {{"plan", "memory, communication and time of a run, without running it", true, "", {ranks, ranks_per_host, json}},
       by_one_process(run_plan)},
      {{"groups", "which rank is in which group", false, "parallel", {ranks, ranks_per_host, json}},
       by_one_process(run_groups)},
      {{"verify", "this layout against one rank: loss, gradient norm, every gradient", true, "", {ranks, json}},
       run_verify},
      {{"eval", "loss and perplexity on the held-out split", true, "", {ranks}}, run_eval},
      {{"generate", "continue a prompt", true, "", {ranks, prompt, max_tokens, temperature}},
       with_thread_ranks(run_generate)},
  };
  return table;
}

CommandLine parse(const std::vector<std::string>& arguments) {
  std::vector<CommandSpec> specs;
  for (const Command& command : commands()) specs.push_back(command.spec);
  return parse_command_line(arguments, specs);
}

int run(const std::vector<std::string>& arguments, Session& session) {
  const Launch launch = read_launch([](const char* name) { return std::getenv(name); });
  CommandLine line;
  try {
    line = parse(arguments);
  } catch (const ConfigError&) {
    session.join(launch);  // so that one process says it
    throw;
  }
  if (!line.printout.empty()) {
    if (launch.process == 0) std::fputs(line.printout.c_str(), stdout);
    return 0;
  }
  session.join(launch);
  line.ranks = agreed_ranks(line.ranks, launch);
  for (const Command& command : commands()) {
    if (command.spec.name == line.command) return command.run(line, session);
  }
  throw InternalError("no command " + line.command);
}

}  // namespace
}  // namespace farspan

int main(int argc, char** argv) {
  farspan::Session session;
  try {
    const int status = farspan::run(std::vector<std::string>(argv + (argc > 0 ? 1 : 0), argv + argc), session);
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
      throw farspan::DataError("standard output cannot be written");
    session.finish();
    return status;
  } catch (...) {
    return session.fail(std::current_exception());
  }
}
