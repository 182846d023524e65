// SPDX-License-Identifier: Apache-2.0
#include "plan/verify.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>

namespace farspan {
namespace {

// fp32 sums of some thousand terms in another order differ by a few hundred units in the last place of the largest;
// bf16 activations are rounded once per op in either layout, at places that depend on it.
constexpr double kToleranceF32 = 1e-5;
constexpr double kToleranceBf16 = 2e-2;
// Roundings to 4 significant bits (3 of gradients) that another order of sums moves: up to 4 % of a gradient on the
// demo's model over 2 and 4 ranks.
constexpr double kToleranceFp8 = 0.1;

struct Gradients {
  std::optional<double> loss;
  double norm = 0;
  std::vector<float> flat;  // whole, as the ParameterTable of one rank lays them out
  bool ranks_agree = true;
};

Gradients first_step_gradients(const Job& job) {
  Gradients result;
  run_job(job, [&](RankTrainer& trainer, World&) {
    trainer.initialise_weights();
    std::vector<float> gradients;
    bool agree = true;
    const StepReport report = trainer.train_step(1, false, [&] {
      gradients = trainer.whole_values(StateKind::gradients);
      agree = trainer.ranks_hold(StateKind::gradients, gradients);
    });
    if (trainer.context().rank != 0) return;
    result = {
        .loss = report.totals.loss, .norm = report.gradient_norm, .flat = std::move(gradients), .ranks_agree = agree};
  });
  return result;
}

GradientDifference compare(const Parameter& parameter, const std::vector<float>& layout,
                           const std::vector<float>& one) {
  GradientDifference result;
  result.name = parameter.name;
  for (int64_t i = parameter.offset; i < parameter.offset + parameter.shape.numel(); ++i) {
    const double a = layout[static_cast<size_t>(i)];
    const double b = one[static_cast<size_t>(i)];
    result.signal = std::max(result.signal, std::abs(b));
    // max() would drop a NaN; a NaN difference must win.
    if (!(std::abs(a - b) <= result.difference)) result.difference = std::abs(a - b);
  }
  return result;
}

double relative_difference(double a, double b) { return std::abs(a - b) / std::max(1e-30, std::abs(b)); }

std::string number_or_null(const std::optional<double>& value) {
  return value ? fmt::format("{:.17g}", *value) : "null";
}

}  // namespace

bool VerifyReport::equal() const {
  if (loss_layout.has_value() != loss_one.has_value()) return false;
  if (loss_one && !(relative_difference(*loss_layout, *loss_one) <= tolerance)) return false;
  if (norm_one > 0 && !(relative_difference(norm_layout, norm_one) <= tolerance)) return false;
  const bool gradients_equal = std::all_of(gradients.begin(), gradients.end(),
                                           [&](const GradientDifference& g) { return g.relative() <= tolerance; });
  return gradients_equal && ranks_agree;
}

std::optional<VerifyReport> verify_layout(const Config& config, int world_size, Processes* processes) {
  const Job layout_job = make_job(config, world_size, RunKind::train, JobData::open, processes);
  Gradients reference;
  if (layout_job.runs_rank_0()) {
    Config one = layout_job.config;
    one.parallel = {};
    reference = first_step_gradients(make_job(one, 1, RunKind::train, JobData::open));
  }
  const Gradients layout = first_step_gradients(layout_job);
  if (!layout_job.runs_rank_0()) return std::nullopt;

  VerifyReport report;
  report.loss_layout = layout.loss;
  report.loss_one = reference.loss;
  report.norm_layout = layout.norm;
  report.norm_one = reference.norm;
  report.ranks_agree = layout.ranks_agree;
  switch (layout_job.config.training.precision) {
    case Precision::fp32:
      report.tolerance = kToleranceF32;
      report.unit_roundoff = 0x1.0p-24;
      break;
    case Precision::bf16:
      report.tolerance = kToleranceBf16;
      report.unit_roundoff = 0x1.0p-9;
      break;
    case Precision::fp8:
      report.tolerance = kToleranceFp8;
      report.unit_roundoff = 0x1.0p-4;
      break;
  }
  const ParameterTable table(layout_job.config.model);
  for (const Parameter& parameter : table.parameters())
    report.gradients.push_back(compare(parameter, layout.flat, reference.flat));
  double largest = 0;
  for (const GradientDifference& g : report.gradients) largest = std::max(largest, g.signal);
  for (GradientDifference& g : report.gradients) g.signal = std::max(g.signal, kSmallestSignal * largest);
  std::stable_sort(report.gradients.begin(), report.gradients.end(),
                   [](const auto& a, const auto& b) { return a.relative() > b.relative(); });
  return report;
}

std::string verify_json(const VerifyReport& report) {
  std::string text = fmt::format(
      "{{\"equal\":{},\"tolerance\":{:.17g},\"ranks_agree\":{},\"loss\":{{\"layout\":{},\"one\":{}}},"
      "\"grad_norm\":{{\"layout\":{:.17g},\"one\":{:.17g}}},\"gradients\":[",
      report.equal(), report.tolerance, report.ranks_agree, number_or_null(report.loss_layout),
      number_or_null(report.loss_one), report.norm_layout, report.norm_one);
  bool first = true;
  for (const GradientDifference& g : report.gradients) {
    text += fmt::format("{}{{\"name\":\"{}\",\"relative_error\":{:.17g},\"units_of_rounding\":{:.17g}}}",
                        first ? "" : ",", g.name, g.relative(), g.relative() / report.unit_roundoff);
    first = false;
  }
  return text + "]}\n";
}

std::string verify_text(const VerifyReport& report) {
  constexpr size_t kShown = 8;
  const auto loss = [](const std::optional<double>& value) { return value ? fmt::format("{:.9f}", *value) : "none"; };
  std::string text = fmt::format(
      "              this layout       one rank\nloss       {:>14} {:>14}\ngrad norm  {:>14.9f} {:>14.9f}\n\n"
      "worst gradients          relative error   in units of rounding\n",
      loss(report.loss_layout), loss(report.loss_one), report.norm_layout, report.norm_one);
  for (size_t i = 0; i < std::min(kShown, report.gradients.size()); ++i) {
    const GradientDifference& g = report.gradients[i];
    text += fmt::format("{:<34} {:>10.3g} {:>10.1f}\n", g.name, g.relative(), g.relative() / report.unit_roundoff);
  }
  text += fmt::format("all {} parameters; ranks hold {} gradient bits; tolerance {:g} of the signal: {}\n",
                      report.gradients.size(), report.ranks_agree ? "the same" : "DIFFERENT", report.tolerance,
                      report.equal() ? "equal" : "NOT EQUAL");
  return text;
}

}  // namespace farspan
