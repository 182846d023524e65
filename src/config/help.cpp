// SPDX-License-Identifier: Apache-2.0
#include "config/help.h"

#include <fmt/format.h>

#include "config/keys.h"
#include "config/presets.h"

namespace farspan {
namespace {

constexpr size_t kHelpColumn = 52;  // wide enough for most flags; longer ones put their help on the next line

std::string entry(const std::string& left, const std::string& help) {
  std::string text = "  " + left;
  if (text.size() + 2 > kHelpColumn) {
    text += "\n" + std::string(kHelpColumn, ' ');
  } else {
    text.resize(kHelpColumn, ' ');
  }
  return text + help + "\n";
}

std::string keys_help(const std::string& only_section) {
  const Config defaults;
  std::string text, section;
  for (const Key& key : config_keys()) {
    if (!only_section.empty() && key.section != only_section) continue;
    if (key.section != section) {
      section = key.section;
      text += fmt::format("\n{}:\n", section);
    }
    const std::string value = key.write(defaults);
    const std::string shown = value == "\"\"" || value == "[]" ? "" : fmt::format(" [{}]", value);
    text += entry(fmt::format("{} {}", key.flag(), key.values), key.help + shown);
  }
  return text;
}

constexpr const char* kKeysHeading =
    "\nConfiguration keys. In the file they stand under their section, with underscores; as flags they beat the file.\n"
    "A flag of a true|false key means true when it stands alone. Defaults are in brackets.\n";

std::string presets_help() { return fmt::format("\nPresets: {}\n", fmt::join(preset_names(), ", ")); }

}  // namespace

OptionHelp option_help(CommandOption option) {
  switch (option) {
    case CommandOption::ranks:
      return {"--ranks", "N",
              "ranks to start, as threads of this process [the launcher's, or the product of the parallel sizes]"};
    case CommandOption::ranks_per_host:
      return {"--ranks-per-host", "N",
              "ranks on each machine of a cluster to plan for [the launcher's, or all on one]"};
    case CommandOption::output:
      return {"--output", "DIR", "folder of the run [runs/NAME, after the config file]"};
    case CommandOption::profile:
      return {"--profile", "", "time every op: a table at the end, and profile.json in the folder of the run"};
    case CommandOption::json:
      return {"--json", "", "print JSON"};
    case CommandOption::prompt:
      return {"--prompt", "TEXT", "what to continue"};
    case CommandOption::max_tokens:
      return {"--max-tokens", "N", "tokens to generate at most [128]"};
    case CommandOption::temperature:
      return {"--temperature", "X", "spread of the choice of tokens; 0: the most likely each time [0]"};
  }
  return {};
}

std::string command_help(const CommandSpec& command) {
  std::string text = fmt::format("farspan {} {} [options]\n{}\n\n", command.name,
                                 command.config_required ? "CONFIG.yaml" : "[CONFIG.yaml]", command.summary);
  for (CommandOption option : command.options) {
    const OptionHelp help = option_help(option);
    text += entry(help.values.empty() ? help.flag : help.flag + " " + help.values, help.help);
  }
  text += entry("--help", "print this");
  return text + kKeysHeading + keys_help(command.only_section) + (command.only_section.empty() ? presets_help() : "");
}

std::string program_help(std::span<const CommandSpec> commands) {
  std::string text =
      "farspan COMMAND [CONFIG.yaml] [options]\nTrains transformers on very long sequences.\n\nCommands:\n";
  for (const CommandSpec& command : commands) text += entry(command.name, command.summary);
  text += "\nOptions (which command takes which: farspan COMMAND --help):\n";
  for (CommandOption option :
       {CommandOption::ranks, CommandOption::ranks_per_host, CommandOption::output, CommandOption::profile,
        CommandOption::json, CommandOption::prompt, CommandOption::max_tokens, CommandOption::temperature}) {
    const OptionHelp help = option_help(option);
    text += entry(help.values.empty() ? help.flag : help.flag + " " + help.values, help.help);
  }
  text += entry("--help", "print this") + entry("--version", "print the version");
  text += kKeysHeading + keys_help("") + presets_help();
  text +=
      "\nExit status: 0 done; 1 internal error, or verify found a difference; 2 bad configuration or command line; 3 "
      "bad\n"
      "data or checkpoint; 4 does not fit in memory; 5 a rank failed or a deadline passed; 130, 143 stopped by a "
      "signal\n"
      "after saving.\n";
  return text;
}

}  // namespace farspan
