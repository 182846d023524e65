// SPDX-License-Identifier: Apache-2.0
// farspan verify: the configured layout and one rank side by side. Status 1 when they differ.
#include <cmath>
#include <cstdio>
#include <fmt/format.h>

#include "command.h"
#include "config/command_line.h"
#include "config/validate.h"
#include "plan/verify.h"

namespace farspan {

int run_verify(const CommandLine& line, Session& session) {
  const Config config = load_config(line);
  const int ranks = world_size(config, line.ranks);
  const std::optional<VerifyReport> of_rank_0 = verify_layout(config, ranks, session.processes_for(config, ranks));
  if (!of_rank_0) return 0;
  const VerifyReport& report = *of_rank_0;
  const std::string text = line.json ? verify_json(report) : verify_text(report);
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
  if (report.equal()) return 0;
  const GradientDifference& worst = report.gradients.front();
  throw InternalError(fmt::format(
      "verify: this layout and one rank differ: gradient of {} by {:.3g} of its signal, allowed {:g}; loss {} against "
      "{}",
      worst.name, worst.relative(), report.tolerance, report.loss_layout.value_or(NAN), report.loss_one.value_or(NAN)));
}

}  // namespace farspan
