// SPDX-License-Identifier: Apache-2.0
// A layout against one rank: the same start, the same global batch; loss, gradient norm and every parameter's gradient
// side by side.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "train/job.h"

namespace farspan {

// A gradient that is zero but for rounding (a softmax over one key, say) has no signal of its own: it is held against
// this share of the largest gradient of the model.
inline constexpr double kSmallestSignal = 1e-3;

struct GradientDifference {
  std::string name;
  double signal = 0;  // largest element of the one-rank gradient, absolute; at least kSmallestSignal of all parameters'
  double difference = 0;  // largest |layout - one rank|
  double relative() const { return signal > 0 ? difference / signal : difference; }
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

// Runs step 1 of `config` on one rank and on `world_size`. Where the ranks are processes the one is rank 0's, for which
// the others wait, and the report is rank 0's alone: nothing elsewhere.
std::optional<VerifyReport> verify_layout(const Config& config, int world_size, Processes* processes = nullptr);

std::string verify_json(const VerifyReport& report);
std::string verify_text(const VerifyReport& report);

}  // namespace farspan
