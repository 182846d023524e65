// SPDX-License-Identifier: Apache-2.0
// farspan verify: the configured layout and one rank side by side. Status 1 when they differ.
#include <cstdio>

#include "command.h"
#include "config/command_line.h"
#include "config/validate.h"
#include "plan/verify.h"

namespace farspan {

int run_verify(const CommandLine& line) {
  const Config config = load_config(line);
  const VerifyReport report = verify_layout(config, world_size(config, line.ranks));
  const std::string text = line.json ? verify_json(report) : verify_text(report);
  std::fputs(text.c_str(), stdout);
  return report.equal() ? 0 : 1;
}

}  // namespace farspan
