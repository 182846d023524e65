// SPDX-License-Identifier: Apache-2.0
// A layout against one rank: the same start, the same global batch; loss, gradient norm and every parameter's gradient
// side by side.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "train/job.h"

namespace farspan {

struct GradientDifference {
  std::string name;
  double largest = 0;     // largest element of the one-rank gradient, absolute
  double difference = 0;  // largest |layout - one rank|
  double relative() const { return largest > 0 ? difference / largest : difference; }
};

struct VerifyReport {
  std::optional<double> loss_layout;
  std::optional<double> loss_one;
  double norm_layout = 0;
  double norm_one = 0;
  bool ranks_agree = true;                    // every rank of the layout holds the same gradient bits
  std::vector<GradientDifference> gradients;  // every parameter, worst first
  double tolerance = 0;                       // relative to the signal
  double unit_roundoff = 0;                   // of the compute type
  bool equal() const;                         // all within the tolerance
};

// Runs step 1 of `config` on `world_size` ranks and on one.
VerifyReport verify_layout(const Config& config, int world_size);

std::string verify_json(const VerifyReport& report);
std::string verify_text(const VerifyReport& report);

}  // namespace farspan
