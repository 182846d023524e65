// SPDX-License-Identifier: Apache-2.0
// CLI11's adaptor: it takes the arguments apart; what they mean is decided here and in config/load.cpp.
#include "config/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <map>
#include <set>

#include "base/error.h"
#include "base/nearest_name.h"
#include "config/help.h"
#include "config/keys.h"
#include "config/value_text.h"

namespace farspan {
namespace {

constexpr int64_t kMostTokens = 1'000'000'000;  // years of them; keeps sums with a prompt's length far from overflow
constexpr std::array<std::string_view, 6> kLaterCommands = {"prepare", "import", "export", "doctor", "bench", "report"};

const CommandSpec& find_command(const std::string& name, std::span<const CommandSpec> commands) {
  std::vector<std::string> names;
  for (const CommandSpec& command : commands) {
    if (command.name == name) return command;
    names.push_back(command.name);
  }
  const std::string all = fmt::format("{}", fmt::join(names, ", "));
  if (std::find(kLaterCommands.begin(), kLaterCommands.end(), name) != kLaterCommands.end()) {
    throw ConfigError(fmt::format("the command {} is not in this version; the commands are {}", name, all));
  }
  if (name.starts_with("-")) {
    throw ConfigError(
        fmt::format("{} stands before the command; write farspan COMMAND {} ..., with one of {}", name, name, all));
  }
  throw ConfigError(
      fmt::format("unknown command {}{}; the commands are {}", name,
                  nearest_name(name, names).empty() ? "" : ", did you mean " + nearest_name(name, names) + "?", all));
}

bool takes(const CommandSpec& command, const Key& key) {
  return command.only_section.empty() || key.section == command.only_section;
}

// "--flag false" becomes "--flag=false" for true|false keys, whose flag may also stand alone.
std::vector<std::string> join_booleans(const CommandSpec& command, std::span<const std::string> arguments) {
  std::vector<std::string> booleans;
  for (const Key& key : config_keys()) {
    if (key.is_boolean && takes(command, key)) booleans.push_back(key.flag());
  }
  std::vector<std::string> joined;
  for (const std::string& argument : arguments) {
    const bool value = argument == "true" || argument == "false";
    const bool after_flag =
        !joined.empty() && std::find(booleans.begin(), booleans.end(), joined.back()) != booleans.end();
    if (value && after_flag) {
      joined.back() += "=" + argument;
    } else {
      joined.push_back(argument);
    }
  }
  return joined;
}

// The texts given for each flag, in order; a flag that stands alone has the text "true".
class FlagTexts {
 public:
  explicit FlagTexts(const CommandSpec& command) : command_(command) {
    app_.set_help_flag();
    app_.allow_extras();
    app_.add_option("CONFIG.yaml", positionals_);
    for (CommandOption option : command.options) {
      const OptionHelp help = option_help(option);
      add(help.flag, help.values.empty());
    }
    for (const Key& key : config_keys()) {
      if (takes(command, key)) add(key.flag(), key.is_boolean);
    }
    add("--help", true);
  }

  void parse(std::vector<std::string> arguments) {
    require_values(arguments);
    std::reverse(arguments.begin(), arguments.end());  // the order in which CLI11 wants them
    try {
      app_.parse(arguments);
    } catch (const CLI::ParseError& error) {
      throw ConfigError(fmt::format("{}; see farspan {} --help", error.what(), command_.name));
    }
    for (const std::string& extra : app_.remaining()) {
      if (extra.starts_with("-") && extra.size() > 1) fail_unknown(extra.substr(0, extra.find('=')));
    }
  }

  const std::vector<std::string>& positionals() const { return positionals_; }
  const std::vector<std::string>& of(const std::string& flag) const { return texts_.at(flag); }
  bool given(const std::string& flag) const { return !of(flag).empty(); }

  // The one text of a flag, or empty.
  std::string single(const std::string& flag) const {
    const std::vector<std::string>& texts = of(flag);
    if (texts.size() > 1) {
      throw ConfigError(fmt::format("{} is given twice, as {} and {}; keep one of the two", flag, texts[0], texts[1]));
    }
    return texts.empty() ? std::string() : texts[0];
  }

 private:
  void add(const std::string& flag, bool stands_alone) {
    std::vector<std::string>& texts = texts_[flag];
    if (stands_alone) {
      app_.add_flag(flag, texts)->take_all();
    } else {
      valued_.insert(flag);
      app_.add_option(flag, texts)->take_all()->allow_extra_args(false);
    }
  }

  // CLI11 would take the next flag for the value of one that has none.
  void require_values(const std::vector<std::string>& arguments) const {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!valued_.contains(arguments[i])) continue;
      const bool last = i + 1 == arguments.size();
      if (!last && !texts_.contains(arguments[i + 1].substr(0, arguments[i + 1].find('=')))) {
        ++i;
        continue;
      }
      throw ConfigError(fmt::format("{} needs a value, found {}; write {} VALUE", arguments[i],
                                    last ? "nothing" : "the flag " + arguments[i + 1], arguments[i]));
    }
  }

  [[noreturn]] void fail_unknown(const std::string& flag) const {
    std::vector<std::string> known;
    for (const auto& [name, texts] : texts_) known.push_back(name);
    std::string hint = did_you_mean(flag, known);
    if (hint.empty()) hint = fmt::format("; see farspan {} --help", command_.name);
    throw ConfigError(fmt::format("farspan {} has no flag {}{}", command_.name, flag, hint));
  }

  const CommandSpec& command_;
  CLI::App app_;
  std::vector<std::string> positionals_;
  std::map<std::string, std::vector<std::string>> texts_;
  std::set<std::string> valued_;  // flags that a value must follow
};

// A number after one of the options that are not configuration keys.
template <typename Read>
auto number(const FlagTexts& flags, const std::string& flag, Read read) {
  try {
    return read(flags.single(flag));
  } catch (const ValueError& error) {
    throw ConfigError(fmt::format("{}: {}", flag, error.what()));
  }
}

void take_option(const FlagTexts& flags, CommandOption option, CommandLine& line) {
  const std::string flag = option_help(option).flag;
  if (!flags.given(flag)) return;
  switch (option) {
    case CommandOption::ranks:
      line.ranks = number(flags, flag, read_integer);
      if (line.ranks < 1) throw ConfigError(fmt::format("--ranks {} is too small; use 1 or more", line.ranks));
      return;
    case CommandOption::ranks_per_host:
      line.ranks_per_host = number(flags, flag, read_integer);
      if (line.ranks_per_host < 1)
        throw ConfigError(fmt::format("--ranks-per-host {} is too small; use 1 or more", line.ranks_per_host));
      return;
    case CommandOption::output:
      line.output = flags.single(flag);
      if (line.output.empty()) throw ConfigError("--output is empty; name a folder, or leave it out for runs/NAME");
      return;
    case CommandOption::profile:
      line.profile = true;
      return;
    case CommandOption::json:
      line.json = true;
      return;
    case CommandOption::prompt:
      line.prompt = flags.single(flag);
      return;
    case CommandOption::max_tokens:
      line.max_tokens = number(flags, flag, read_integer);
      if (line.max_tokens < 1)
        throw ConfigError(fmt::format("--max-tokens {} is too small; use 1 or more", line.max_tokens));
      if (line.max_tokens > kMostTokens)
        throw ConfigError(fmt::format("--max-tokens {} is too large; use at most {}", line.max_tokens, kMostTokens));
      return;
    case CommandOption::temperature:
      line.temperature = number(flags, flag, read_real);
      if (line.temperature < 0)
        throw ConfigError(fmt::format("--temperature {} is negative; use 0 or more", line.temperature));
      return;
  }
}

}  // namespace

CommandLine parse_command_line(const std::vector<std::string>& arguments, std::span<const CommandSpec> commands) {
  CommandLine line;
  if (arguments.empty()) throw ConfigError("no command given; see farspan --help");
  if (arguments[0] == "--help" || arguments[0] == "-h" || arguments[0] == "help") {
    line.printout = program_help(commands);
    return line;
  }
  if (arguments[0] == "--version") {
    line.printout = fmt::format("farspan {}\n", kVersion);
    return line;
  }

  const CommandSpec& command = find_command(arguments[0], commands);
  line.command = command.name;
  const std::vector<std::string> rest = join_booleans(command, std::span(arguments).subspan(1));
  if (std::find(rest.begin(), rest.end(), "-h") != rest.end() ||
      std::find(rest.begin(), rest.end(), "--help") != rest.end()) {
    line.printout = command_help(command);
    return line;
  }
  FlagTexts flags(command);
  flags.parse(rest);
  if (flags.positionals().size() > 1) {
    throw ConfigError(fmt::format("farspan {} reads one config file, found {}", command.name,
                                  fmt::join(flags.positionals(), " and ")));
  }
  if (!flags.positionals().empty()) line.config_path = flags.positionals()[0];
  if (line.config_path.empty() && command.config_required) {
    throw ConfigError(fmt::format("no config file given; write farspan {} CONFIG.yaml ...", command.name));
  }
  for (CommandOption option : command.options) take_option(flags, option, line);
  for (const Key& key : config_keys()) {
    if (!takes(command, key)) continue;
    for (const std::string& text : flags.of(key.flag())) line.overrides.emplace_back(key.path(), text);
    if (key.path() == "output.load") line.load = flags.single(key.flag());
  }
  return line;
}

Config load_config(const CommandLine& line) {
  Config config = load_config(line.config_path, line.overrides);
  if (config.name.empty()) config.name = line.command;
  return config;
}

}  // namespace farspan
