// SPDX-License-Identifier: Apache-2.0
// The text of --help: commands, options, and every configuration key by section.
#pragma once

#include <span>
#include <string>

#include "config/command_line.h"

namespace farspan {

std::string program_help(std::span<const CommandSpec> commands);
std::string command_help(const CommandSpec& command);

// An option's flag, what follows it, and its help: {"--ranks", "N", "..."}.
struct OptionHelp {
  std::string flag;
  std::string values;  // empty: nothing follows
  std::string help;
};
OptionHelp option_help(CommandOption option);

}  // namespace farspan
