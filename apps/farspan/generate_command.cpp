// SPDX-License-Identifier: Apache-2.0
// farspan generate: continues a prompt with a checkpoint's model, on one rank.
#include <cstdio>
#include <fmt/format.h>
#include <string_view>
#include <utility>

#include "command.h"
#include "config/command_line.h"
#include "data/tokenizer.h"
#include "train/checkpoint.h"
#include "train/generate.h"

namespace farspan {

int run_generate(const CommandLine& line) {
  const Config config = load_config(line);
  if (line.ranks > 1)
    throw ConfigError(fmt::format("generate: --ranks {}; a text is continued on one rank", line.ranks));
  if (config.output.load.empty()) throw ConfigError("generate: no checkpoint given; say --load DIR");
  if (line.prompt.empty()) throw ConfigError("generate: no prompt given; say --prompt TEXT");
  const Tokenizer tokenizer = Tokenizer::from_name(config.data.tokenizer);
  GenerateOptions options;
  options.checkpoint = find_checkpoint(config.output.load);
  options.max_tokens = line.max_tokens;
  options.temperature = line.temperature;
  options.end_token = tokenizer.end_of_document();
  options.prompt.resize(line.prompt.size());
  const std::span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(line.prompt.data()), line.prompt.size());
  tokenizer.encode(bytes, options.prompt);

  // Behind whatever there is to say before the first token.
  std::string_view unsaid = line.prompt;
  const auto say_prompt = [&] { fmt::print("{}", std::exchange(unsaid, {})); };
  generate(config, options, [&](int32_t token) {
    say_prompt();
    const std::string text = tokenizer.decode({&token, 1});
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  });
  say_prompt();
  fmt::print("\n");
  return 0;
}

}  // namespace farspan
