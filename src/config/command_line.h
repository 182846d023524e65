// SPDX-License-Identifier: Apache-2.0
// The command line, the same for every command: farspan COMMAND [CONFIG.yaml] [options] [--any-config-key value ...].
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/load.h"

namespace farspan {

inline constexpr std::string_view kVersion = "0.1.0";  // as in CMakeLists.txt's project(); a test compares them

// Options that are not configuration keys.
enum class CommandOption { ranks, ranks_per_host, output, profile, json, prompt, max_tokens, temperature };

// What a command takes.
struct CommandSpec {
  std::string name;
  std::string summary;          // one line
  bool config_required = true;  // the file CONFIG.yaml
  std::string only_section;     // keys of this section only; empty: all keys
  std::vector<CommandOption> options;
};

struct CommandLine {
  std::string command;
  std::string printout;        // --help, --version: what to print; then nothing else is to be done
  std::string config_path;     // empty: none given
  Overrides overrides;         // configuration keys given as flags
  int64_t ranks = 0;           // 0: not given
  int64_t ranks_per_host = 0;  // 0: not given
  std::string output;          // folder of the run; empty: not given
  std::string load;            // --load, which is also among the overrides as output.load
  std::string prompt;
  bool json = false;
  bool profile = false;
  int64_t max_tokens = 128;
  double temperature = 0;  // 0: the most likely token each time
};

// `arguments` without the program's name. Throws ConfigError: no or an unknown command (with the nearest), one that is
// not in this version, an unknown flag (with the nearest), a flag without its value or given twice, a number that is
// none.
CommandLine parse_command_line(const std::vector<std::string>& arguments, std::span<const CommandSpec> commands);

// load_config(config_path, overrides); a configuration without a file is named after the command.
Config load_config(const CommandLine& line);

}  // namespace farspan
